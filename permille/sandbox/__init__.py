"""A confined child process for foreign tokenizers, chat templates and documents. It loads no torch and
no numpy.
"""
