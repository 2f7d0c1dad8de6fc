"""Thousands of jobs under all kinds of faults at once: `make chaos`."""
