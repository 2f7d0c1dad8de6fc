"""Everything at once, and everything that goes wrong: `make chaos`."""
