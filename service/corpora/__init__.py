"""Corpora: registered and listed."""
