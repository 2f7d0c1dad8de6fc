"""Inputs of jobs: base models and corpora, registered and inspected."""
