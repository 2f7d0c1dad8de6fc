"""Simulated federations: the gain and the cost of each method, in one process with the exact arithmetic."""
