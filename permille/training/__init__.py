"""Training along a gradient, for devices and for jobs: Adam on the lattice, and a basis."""
