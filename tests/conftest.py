"""What all tests share."""

import gc
import os
import sys


def pytest_configure() -> None:
    """Let the hundreds of processes that tests start find bytecode, where the environment has turned it off:
    each would compile all that it imports.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """Take what is there to stay out of the collector's sight: modules and tests are millions of objects, and
    a library that collects after each of its steps would walk them all.
    """
    gc.collect()
    gc.freeze()
