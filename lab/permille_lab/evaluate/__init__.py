"""Comparison of methods by their task accuracy and language-modelling loss."""
