"""Rounds: many devices' integers as one state, exactly, in any order (FORMAT 13)."""
