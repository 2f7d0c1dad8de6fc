"""The version of the distribution. Modules import it from here, because `permille` refers to the agent."""

__version__ = "0.1.0"
