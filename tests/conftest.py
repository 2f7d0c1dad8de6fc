"""Hooks of all tests."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from unittest.mock import patch

import pytest

from permille.sandbox import process
from tests.preloaded import FORKED


def pytest_configure() -> None:
    """Let tests not depend on how they were started.

    Processes that tests start write and read bytecode, even if the environment turned it off. There are
    hundreds of them. Without bytecode, each compiles all that it imports. And SIGINT stops a process, even if
    a shell started the tests in its background, where it is ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
