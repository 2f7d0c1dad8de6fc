"""The version of the distribution. It has its own module, because `permille/__init__.py` names programs."""

__version__ = "0.1.0"
