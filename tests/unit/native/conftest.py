"""A test with a `path` runs on all that this machine has: numpy, each compiled path, NEON if emulated."""

import os

import pytest

from permille.native import library
from tests.unit.native.emulated import EmulatedNeon

# `make test-neon` sets it: cross compiler and emulator are too heavy to install for `make test`
NEON = ["emulated-neon"] if os.environ.get("PERMILLE_TEST_NEON") else []
COMPILED = [*library.paths(), *NEON]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`path`: all of them; `compiled`: without numpy."""
    if "path" in metafunc.fixturenames:
        metafunc.parametrize("path", ["numpy", *COMPILED], indirect=True)
    if "compiled" in metafunc.fixturenames:
        metafunc.parametrize("compiled", COMPILED, indirect=True)


@pytest.fixture(scope="session")
def neon(tmp_path_factory: pytest.TempPathFactory) -> EmulatedNeon:
    """Compiled once for the session."""
    return EmulatedNeon(tmp_path_factory.mktemp("neon"))


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
    """The path in use while the test runs."""
    return _use(request, monkeypatch)


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> library.Library:
    """The library of one compiled path, in use while the test runs."""
    _use(request, monkeypatch)
    loaded = library.load()
    assert loaded is not None
    return loaded
