"""Directions, estimators, lattice state, step log and replay. They need no library but numpy."""
