"""What jobs make: builds, masks, quantizations, packages, with the routes that all kinds have alike."""
