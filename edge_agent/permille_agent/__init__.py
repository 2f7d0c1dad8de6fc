"""The device: enrol, download, personalise, use, report."""
