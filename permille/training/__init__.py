"""Training along a gradient, for a device and for a job alike: Adam on the lattice, and pooled states."""
