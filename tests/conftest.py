"""Hooks of all tests."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from unittest.mock import patch

import pytest

from permille.sandbox import process
from tests.preloaded import FORKED


def pytest_configure() -> None:
    """Let processes that tests start write and read bytecode, even if the environment turned it off.

    Tests start hundreds of processes. Without bytecode, each of them compiles all that it imports.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


# First, because pytest itself removes the slow tests in this hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all attacks as slow: most of them start processes. `make attack` shows them by row."""
    for item in items:
        if item.path.parent.name == "attacks":
            item.add_marker(pytest.mark.slow)


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


@pytest.fixture(autouse=True, scope="session")
def forked_trials() -> Iterator[None]:
    """Fork the process that tries a package before its installation. Hundreds of tests install one."""
    with patch.object(process, "subprocess", FORKED):
        yield
