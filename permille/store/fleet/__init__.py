"""The fleet in the database: counts of devices and of their reports."""
