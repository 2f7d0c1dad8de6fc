"""The fleet: all devices in numbers."""
