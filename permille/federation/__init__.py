"""Federations: rounds that combine the integers of many devices exactly, in any order (FORMAT 13)."""
