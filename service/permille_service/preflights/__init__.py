"""Preflights: estimates of what a job needs, compared with what the machine has."""
