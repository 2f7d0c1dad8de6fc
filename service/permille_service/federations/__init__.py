"""Federations: operators define them, and devices join them to train a shared state in rounds."""
