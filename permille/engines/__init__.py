"""The forward pass of a package: losses of several variants of the sparse values on one batch."""
