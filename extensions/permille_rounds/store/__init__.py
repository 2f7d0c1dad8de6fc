"""Federations in the database: their members, rounds, contributions and privacy charges."""
