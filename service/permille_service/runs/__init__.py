"""Runs: the reports of devices, and the logs that they share."""
