"""Packages in an OCI registry. Operators push and pull them, and devices fetch their blobs there."""
