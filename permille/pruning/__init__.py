"""Pruning: choice of weights to set to zero, update of the others, and fine-tuning afterwards."""
