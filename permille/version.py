"""The version of the distribution. The package's `__init__` names programs, so others import it from here."""

__version__ = "0.1.0"
