"""Retention and collection of stored objects."""
