"""Hooks of all tests."""

import gc
import os
import sys
from collections.abc import Generator

import pytest


def pytest_configure() -> None:
    """Let processes that tests start write and read bytecode, even if the environment turned it off.

    Tests start hundreds of processes. Without bytecode, each of them compiles all that it imports.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude modules and tests from garbage collection.

    They are millions of objects. A library that collects after each of its steps would visit all of them.
    """
    gc.disable()
    collected = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return collected
