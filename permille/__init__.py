"""permille: personalise a large language model by training one weight in a thousand.

The library is usable alone; importing it imports nothing heavy. `permille/FORMAT.md` says what is written to
disk.
"""

__version__ = "0.1.0"
