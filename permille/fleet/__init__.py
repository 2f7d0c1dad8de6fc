"""Decisions of rollouts, without I/O: which device takes a version when, and what the reports say
about it.
"""
