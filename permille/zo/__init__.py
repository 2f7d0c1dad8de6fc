"""Directions, estimators, lattice state, step log and replay. numpy only."""
