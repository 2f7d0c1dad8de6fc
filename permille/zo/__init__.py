"""Directions, estimators, lattice state, step log and replay, all in numpy."""
