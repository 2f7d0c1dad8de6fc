"""All attacks are slow tests: most of them start processes. `make attack` shows them by row."""

from pathlib import Path

import pytest


# First, because pytest itself removes the slow tests in this hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as slow."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
