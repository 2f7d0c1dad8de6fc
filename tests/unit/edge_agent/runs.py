"""Fixtures for tests of runs: a home with an installed tiny package, a user's text, and quick options."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.engines.interface import Engine
from permille.package.reader import Package
from permille_agent.state.home import Home, open_home
from permille_agent.state.models import Active, InstalledRelease, active_model, record_installed
from permille_agent.text.preparation import prepare
from permille_agent.text.reading import read_documents
from permille_agent.text.tokens import package_tokenizer
from permille_agent.training.options import RunContext, TrainOptions
from permille_agent.training.outcome import RunResult
from permille_agent.training.personal import model_values
from permille_agent.training.plan import Plan, make_plan
from permille_agent.training.run import Run, RunClock, RunFolder
from permille_agent.training.steps import SelectedState, train
from permille_agent.training.train import run_training
from tests.bigram_engine import bigram_engine
from tests.packages import sentences, tiny_package

QUICK = TrainOptions(
    estimator=EstimatorKind.ONE_SIDED, seed=0, steps=12, queries=4, batch_rows=2, row_tokens=32
)

TINY_RATE = 1.0
"""Factor of the gradient's learning rate. The tiny model, a table of pairs, learns by larger steps."""

Begin = Callable[..., Run]


class Killed(BaseException):
    """Stand-in for SIGKILL. As a `BaseException`, it passes every `except Exception`."""


def home_with_package(root: Path, *, chat_template: str | None = None) -> tuple[Home, Package]:
    home = open_home(root)
    package = tiny_package(home.blobs, chat_template=chat_template)
    record_installed(home, InstalledRelease(name="tiny", version=1, manifest_digest=package.digest))
    return home, package


def user_text(folder: Path, count: int = 320, *, seed: int = 3) -> Path:
    """Write a file of user text about days and rivers."""
    path = folder / "user.txt"
    path.write_text("\n\n".join(sentences(count, seed=seed)))
    return path


def run_of(
    package: Package, engine: Engine, text: Path, folder: Path, options: TrainOptions = QUICK, **changes: Any
) -> Run:
    """Return a run, prepared for its phases."""
    options = replace(options, **changes)
    documents, _ = read_documents([text])
    tokenizer = package_tokenizer(package)
    folder.mkdir(exist_ok=True, parents=True)
    return Run(
        folder=RunFolder(folder),
        clock=RunClock(RunFolder(folder)),
        package=package,
        engine=engine,
        w_base_K=package.values(),
        prepared=prepare(documents, tokenizer, row_tokens=options.row_tokens),
        options=options,
    )


def train_quickly(home: Home, data_paths: Sequence[Path], **changes: Any) -> RunResult:
    """Return the result of `run_training` with quick options.

    `changes` are fields of the options or the context.
    """
    options = {name: changes.pop(name) for name in list(changes) if name in TrainOptions.__dataclass_fields__}
    context = RunContext(**{"engine_of": bigram_engine, **changes})
    return run_training(home, data_paths, replace(QUICK, **options), context)


def plan_and_train(run: Run) -> tuple[Plan, SelectedState]:
    """Return the plan and the selected state of `run`."""
    plan = make_plan(run)
    return plan, train(run, plan)


@dataclass(frozen=True)
class Device:
    """A home with a tiny package installed, and the user's text."""

    home: Home
    package: Package
    text: Path

    def train(self, *more: Path, **changes: Any) -> RunResult:
        """Train on the user's text and `more`. See `train_quickly`."""
        return train_quickly(self.home, [self.text, *more], **changes)

    def install(self, version: int, **changes: Any) -> Package:
        """Install another tiny package as a later version of the release."""
        package = tiny_package(self.home.blobs, **changes)
        release = InstalledRelease(name="tiny", version=version, manifest_digest=package.digest)
        record_installed(self.home, release)
        return package

    def active(self) -> Active:
        """Return the active model. There must be one."""
        active = active_model(self.home)
        assert active is not None
        return active

    def used_values(self) -> NDArray[np.float32]:
        """Return the values of the active model, which must be one of `package`."""
        return model_values(self.home, self.active(), self.package)


def device_at(root: Path, text: Path) -> Device:
    """Return a device with its home in `root`."""
    return Device(*home_with_package(root), text)
