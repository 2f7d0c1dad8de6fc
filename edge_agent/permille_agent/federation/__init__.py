"""Rounds on this device: membership by the user's choice, the history, the device's part, what it sends."""
