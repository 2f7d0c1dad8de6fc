"""Doctests of the extension."""

import doctest
import importlib
import pkgutil

import pytest

import permille_rounds

MODULES = [one.name for one in pkgutil.walk_packages(permille_rounds.__path__, "permille_rounds.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_give_what_they_show(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
