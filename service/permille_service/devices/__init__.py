"""Devices: invited, enrolled, given tokens, revoked."""
