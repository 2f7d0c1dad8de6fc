"""The version of the distribution.

It has a module of its own, because the library may not import `permille`, whose `__init__` refers to the
agent.
"""

__version__ = "0.1.0"
RESULTS = 2
"""Raise this with each change that gives another result for an equal request, such as of how rows are drawn.

The service then works again for a request that it has answered before.
"""
