"""A confined child process for untrusted tokenizers, chat templates and documents. It loads no torch and
no numpy.
"""
