"""Sparse models: an extension that sets weights of a model to zero, and can fine-tune the others afterwards.

The modules of this folder are the mathematics: which weights to remove, the update of the others, and the
recovery. Each of the folders `service` and `workers` is the part of one program.
"""
