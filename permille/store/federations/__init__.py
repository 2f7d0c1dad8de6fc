"""Federations in the database: who joined, what each round was sent, what it made of it."""
