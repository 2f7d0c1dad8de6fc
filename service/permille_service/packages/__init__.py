"""Packages: made, listed, and served blob by blob."""
