"""Attacks on the published rounds of one device, with and without noise."""
