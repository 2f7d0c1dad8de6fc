"""Differential privacy for the devices of a federation: exact noise, its cost, and masks that a keeper
lifts.
"""
