"""Fixtures of the native kernels' paths: numpy, each compiled path of this machine, and emulated NEON."""

import os
from pathlib import Path

import pytest

from permille.native import library
from tests.unit.native.emulated import EmulatedNeon

# `make test-neon` sets the variable to `1`, or to the library of a wheel. `make test` should not need a cross
# compiler and an emulator.
TESTED = os.environ.get("PERMILLE_TEST_NEON")
NEON = ["emulated-neon"] if TESTED else []
COMPILED = [*library.paths(), *NEON]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with `path` on all paths, and tests with `compiled` on all except numpy."""
    if "path" in metafunc.fixturenames:
        metafunc.parametrize("path", ["numpy", *COMPILED], indirect=True)
    if "compiled" in metafunc.fixturenames:
        metafunc.parametrize("compiled", COMPILED, indirect=True)


@pytest.fixture(scope="session")
def neon(tmp_path_factory: pytest.TempPathFactory) -> EmulatedNeon:
    """Return the emulated NEON path, compiled once per session."""
    built = None if TESTED in (None, "1") else Path(TESTED)
    return EmulatedNeon(tmp_path_factory.mktemp("neon"), built)


def _use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "emulated-neon":
        emulated = request.getfixturevalue("neon")
        monkeypatch.setattr(library, "_load", lambda wanted: None if wanted == "off" else emulated)
        monkeypatch.delenv(library.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(library.VARIABLE, "off" if name == "numpy" else name)
    return name


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use one path during the test. Returns its name."""
    return _use(request, monkeypatch)


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> library.Library:
    """Use one compiled path during the test. Returns its library."""
    _use(request, monkeypatch)
    loaded = library.load()
    assert loaded is not None
    return loaded
