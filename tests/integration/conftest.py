"""Fixtures of the integration tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_service import Api, running_api


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """Run a fresh service without a worker."""
    with running_api(tmp_path) as running:
        yield running
