"""Releases: signed, aliased, withdrawn."""
