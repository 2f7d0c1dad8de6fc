"""Quantizations: asked for, listed, and what they cost."""
