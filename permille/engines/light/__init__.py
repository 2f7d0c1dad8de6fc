"""The light engine, for devices: a forward and a reverse pass in numpy and our kernels, without torch."""
