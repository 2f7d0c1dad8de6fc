"""Fixtures for tests of runs: a user's text, runs on it, and a device that trains on it."""

from pathlib import Path
from typing import Any

import pytest

from permille.package.reader import Package
from permille_agent.training.options import TrainOptions
from permille_agent.training.run import Run
from tests.bigram_engine import BigramEngine
from tests.unit.edge_agent.runs import QUICK, Begin, Device, device_at, run_of, user_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the user's text."""
    return user_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def begin(package: Package, text: Path, tmp_path: Path) -> Begin:
    """Return a function that begins a run on `text`, or resumes the run in the same folder."""

    def run(options: TrainOptions = QUICK, folder: str = "run", of: Package = package, **changes: Any) -> Run:
        engine = changes.pop("engine", None) or BigramEngine(of)
        return run_of(of, engine, text, tmp_path / folder, options, **changes)

    return run


@pytest.fixture
def device(text: Path, tmp_path: Path) -> Device:
    """Return a device with a tiny package in a new home."""
    return device_at(tmp_path / "home", text)
