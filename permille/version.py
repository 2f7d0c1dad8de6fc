"""The version of the distribution.

It has a module of its own, because the library may not import `permille`, whose `__init__` refers to the
agent.
"""

__version__ = "0.1.0"
RESULTS = 3
"""Version of the results. Raise it with each change after which an equal request gives another result.

An example is a change of how rows are drawn. The service then computes requests again that it has answered.
"""
