"""The version of the distribution.

It has a module of its own, because the library may not import `permille`, whose `__init__` refers to the
agent.
"""

__version__ = "0.1.0"
