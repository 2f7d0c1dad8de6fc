"""Blob stores of the service: a folder, or a bucket with a folder as its cache."""
