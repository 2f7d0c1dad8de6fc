"""Engines compute a package: losses of several variants of the sparse values on one batch, and text."""
