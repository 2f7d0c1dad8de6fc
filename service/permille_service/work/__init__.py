"""Results of jobs: builds, masks, quantizations, packages, and the routes that all kinds share."""
