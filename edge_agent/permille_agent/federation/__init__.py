"""Rounds on this device: membership by the user's choice, history, training and contributions."""
