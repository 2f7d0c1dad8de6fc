"""Fixtures of all tests."""

import gc
import os
import sys
from collections.abc import Generator

import pytest


def pytest_configure() -> None:
    """Let the hundreds of processes that tests start find bytecode, where the environment has turned it off:
    each would compile all that it imports.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests out of the collector's sight, while they come and from then on: they are
    millions of objects, and a library that collects after each of its steps would walk them all.
    """
    gc.disable()
    collected = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return collected
