"""Kernels in C, called through ctypes on numpy arrays. They need neither torch nor Python headers.

`library` finds the compiled kernels and selects the widest path of this processor. The other modules
describe what their kernels compute. Without the library, they or their callers compute the same in numpy.
Importing the package compiles and loads nothing.
"""
