"""Federations: rounds of many devices, defined by operators, joined by devices."""
