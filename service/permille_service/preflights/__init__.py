"""Preflights: whether the machine can hold a piece of work, with figures."""
