"""Builds: mask, quantization and package in one request."""
