"""The engine that devices run: a forward pass in numpy and our own kernels. No torch, no transformers."""
