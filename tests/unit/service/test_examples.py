"""Doctests of the service and the workers."""

import doctest
import importlib

import pytest

MODULES = (
    "permille_service.cli.client",
    "permille_service.cli.references",
    "permille_service.cli.tables",
    "permille_service.guard",
    "permille_service.limits",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert found.attempted > 0
    assert found.failed == 0
