"""Groups of devices, and rollouts to them, in the REST contract."""
