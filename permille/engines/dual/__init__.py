"""Dual forwarding: both signs of all directions of a step in one forward pass of a graph."""
