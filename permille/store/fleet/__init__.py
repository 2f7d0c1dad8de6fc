"""Counts of device reports: by version, against another version, and for the fleet."""
