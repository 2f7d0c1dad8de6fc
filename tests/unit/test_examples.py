"""Doctests of the library's numeric packages."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import permille

_ROOT = Path(permille.__file__).parent
_FOLDERS = (
    "corpora", "engines", "models", "native", "quantization", "sensitivity", "training", "zo"
)  # fmt: skip
_FILES = [*_ROOT.glob("*.py"), *(path for name in _FOLDERS for path in (_ROOT / name).rglob("*.py"))]
_MODULES = sorted(
    ".".join(["permille", *path.relative_to(_ROOT).with_suffix("").parts])
    for path in _FILES
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("module", _MODULES)
def test_the_examples_of_a_module_are_right(module: str) -> None:
    found = doctest.testmod(import_module(module))
    assert found.attempted and not found.failed
