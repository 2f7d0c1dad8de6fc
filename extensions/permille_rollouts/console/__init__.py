"""The part of rollouts for the console."""
