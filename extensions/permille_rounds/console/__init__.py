"""The part of rounds for the console."""
