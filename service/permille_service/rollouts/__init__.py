"""Rollouts: a version reaches the devices of an alias wave by wave, and stops itself where it harms."""
