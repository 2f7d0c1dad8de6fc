"""The part of sparse models for the console."""
