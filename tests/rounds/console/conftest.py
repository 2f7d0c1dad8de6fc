"""Fixtures of the pages' tests."""

from tests.integration.conftest import api

__all__ = ["api"]
