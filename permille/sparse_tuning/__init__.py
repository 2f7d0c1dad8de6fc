"""Pruning and fine-tuning in turns: a pre-trained model becomes sparse step by step (docs/adr/0008)."""
