"""Releases: publishing, aliases, and withdrawal of versions."""
