"""Doctests of the extension."""

import doctest
import importlib
import pkgutil

import pytest

import permille_sparsify

FOUND = pkgutil.walk_packages(permille_sparsify.__path__, "permille_sparsify.")
# The pages need the console, which may be removed.
MODULES = [one.name for one in FOUND if ".console" not in one.name]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_give_what_they_show(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
