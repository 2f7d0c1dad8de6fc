"""Attacks on the participation of one device in published rounds, with and without noise."""
