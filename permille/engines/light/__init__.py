"""A forward pass in numpy: the parts of `permille.engines.light_engine`. No torch, no transformers."""
