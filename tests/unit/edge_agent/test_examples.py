"""Doctests of the agent."""

import doctest
import importlib
from pathlib import Path

import pytest

import permille_agent

MODULES = sorted(
    ".".join([permille_agent.__name__, *path.relative_to(folder).with_suffix("").parts])
    for folder in map(Path, permille_agent.__path__)
    for path in folder.rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_give_their_output(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed
