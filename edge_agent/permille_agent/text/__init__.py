"""Conversion of the user's files to rows of tokens."""
