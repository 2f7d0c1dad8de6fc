"""Kernels in C, called through ctypes on numpy arrays: no torch, no Python headers, and no need to be there.

`library` finds what was built and chooses the widest path of this processor. Every module beside it says
what its kernels compute, and gives the same results without them. Importing it compiles and loads nothing.
"""
