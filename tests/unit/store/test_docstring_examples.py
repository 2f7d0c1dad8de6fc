"""Doctests of the library's packages."""

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = ("package", "sandbox", "schemas", "store", "trust")
NOT_IMPORTED = ("permille.store.migrations.env",)  # only Alembic can run it


def _modules() -> list[str]:
    names = ["permille.confidence", "permille.telemetry"]
    for package in PACKAGES:
        found = importlib.import_module(f"permille.{package}")
        names += [module.name for module in pkgutil.walk_packages(found.__path__, f"{found.__name__}.")]
    return [name for name in names if name not in NOT_IMPORTED]


@pytest.mark.parametrize("name", _modules())
def test_examples_in_docstrings_give_what_they_show(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
