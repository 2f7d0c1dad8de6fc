"""Engines run a package: they compute losses of several variants of its sparse values, and generate text."""
