"""Evaluations: methods compared on tasks."""
