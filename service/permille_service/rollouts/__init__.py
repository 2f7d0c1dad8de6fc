"""Rollouts: a version reaches the devices of an alias wave by wave, and halts if it does harm."""
