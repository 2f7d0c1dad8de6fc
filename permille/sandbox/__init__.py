"""Confined child processes for untrusted data.

`child` reads tokenizers, chat templates and documents. It loads no torch and no numpy. `conversion` reads
pickled weights and slow tokenizers, with torch and transformers.
"""
