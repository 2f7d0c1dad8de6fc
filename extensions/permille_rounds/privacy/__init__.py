"""Differential privacy for the devices of a federation: exact noise, its cost, and a keeper's masks."""
