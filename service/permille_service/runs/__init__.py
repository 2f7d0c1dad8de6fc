"""Runs: what devices report, and the logs that they share."""
