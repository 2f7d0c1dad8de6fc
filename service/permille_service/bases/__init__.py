"""Bases: asked for, listed, and the evidence behind them."""
