"""The fleet in the database: groups of devices, rollouts, and counts of device reports."""
