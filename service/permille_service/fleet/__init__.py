"""Counts of the fleet, that is, of all devices of a tenant."""
