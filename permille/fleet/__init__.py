"""Rollouts without I/O: who takes a version when, and what the reports of devices say of it."""
