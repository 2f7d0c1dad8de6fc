"""The reference model of the project: its texts, its training from scratch, its measurement."""
