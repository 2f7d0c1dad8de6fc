"""Rounds: an extension that combines the integers of many devices exactly, in any order (FORMAT 13).

The modules of this folder are the mathematics, without I/O. `privacy` has the noise, its accounting and the
masks. Each of the folders `service`, `workers` and `agent` is the part of one program. `keeper` is a program
that another party runs.
"""
