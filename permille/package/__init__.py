"""Packages: manifest, content-addressed layers, reader, writer, signatures. No torch, no network."""
