"""The fixtures of the integration tests."""

from tests.integration.conftest import api

__all__ = ["api"]
