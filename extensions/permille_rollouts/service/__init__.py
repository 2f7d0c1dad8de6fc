"""Rollouts bring a version to the devices of an alias wave by wave, and halt if the version does harm."""
