"""The package format: writing, reading and checking packages (FORMAT 1 to 4)."""
