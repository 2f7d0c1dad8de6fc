"""The durable state of one run: a folder of results, each written once, whole, before anything depends on it.

    run.json            what the run is: package, data digest, seed, settings; its random id for reports
    engine.json         the engine that the run computes with, to its end
    search-*.json       results of the search, thrown-away steps included
    plan.json           epsilon, step size, step unit, steps: logged before the first step
    attempt-<n>.journal the step log of attempt n (permille.zo.journal)
    attempt-<n>.jsonl   losses on the select split, one line an evaluation
    stop.json           where a run with a time limit ended
    losses-*.json       losses by document of the test split
    decision.json       which step, which state, adopted or not, and why
    state.i64           the chosen state, a cache of the journal's replay
    outcome.json        the end: what the user is told, and the metrics of the report

Rules: a result is a function of the run's definition and of earlier results. So a run that is killed anywhere
and started again computes what is missing and ends with the same bits; what was written is never computed
again.
"""

import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from permille.digests import canonical_json
from permille.errors import OperatorError
from permille.files import fsync_folder
from permille_agent.state.home import Home, read_state, write_state

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss on the select split before step `step`; None where it was not finite.

    `seconds` is how long the run had worked by then: it is told, and decides nothing.
    """

    step: int
    loss: float | None
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One folder below `runs/`. Make it with `open_run` or `find_run`."""

    path: Path

    @property
    def name(self) -> str:
        """The folder's name: by it the active personalisation refers to the run."""
        return self.path.name

    @property
    def run_id(self) -> str:
        """The random id by which the service knows the run, once it is reported."""
        return str(self.require("run")["run_id"])

    def load(self, name: str) -> Json | None:
        """The result `name`, or None where it is not there yet."""
        return read_state(self.path / f"{name}.json")

    def require(self, name: str) -> Json:
        """The result `name`.

        Raises:
            OperatorError: it is not there.
        """
        result = self.load(name)
        if result is None:
            raise OperatorError(f"expected {name}.json in {self.path}, found none")
        return result

    def store(self, name: str, result: Mapping[str, Any]) -> None:
        """Write the result `name`, whole or not at all."""
        write_state(self.path / f"{name}.json", result)

    def once(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> Json:
        """The result `name`: read where it is there, else computed, written, and read back."""
        if (known := self.load(name)) is None:
            self.store(name, compute())
            known = self.require(name)
        return known

    def journal(self, attempt: int) -> Path:
        """Where attempt `attempt` keeps its step log."""
        return self.path / f"attempt-{attempt}.journal"

    def evaluations(self, attempt: int) -> list[Evaluation]:
        """All whole evaluations of an attempt; a torn last line is cut off."""
        path = self._evaluations_path(attempt)
        if not path.exists():
            return []
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
                os.fsync(file.fileno())
        lines = [json.loads(line) for line in whole.splitlines()]
        return [Evaluation(**line) for line in lines]

    def append_evaluation(self, attempt: int, evaluation: Evaluation) -> None:
        """Add one evaluation; durable on return."""
        path = self._evaluations_path(attempt)
        new = not path.exists()
        line = json.dumps(asdict(evaluation), allow_nan=False)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            fsync_folder(self.path)

    def _evaluations_path(self, attempt: int) -> Path:
        return self.path / f"attempt-{attempt}.jsonl"


def finite_or_none(number: float) -> float | None:
    """`number` as JSON can hold it: there is no word for what is not finite but null."""
    return number if math.isfinite(number) else None


def open_run(home: Home, definition: Mapping[str, Any]) -> RunFolder:
    """The folder of the run with this definition: the one that was begun, or a new one.

    `definition` decides the results (package, data, seed, settings), so its digest is the folder's name: the
    same command after a crash finds its run.
    """
    name = hashlib.sha256(canonical_json(definition)).hexdigest()[:24]
    run = RunFolder(home.runs / name)
    if not run.path.exists():
        run.path.mkdir(mode=0o700)
        fsync_folder(home.runs)
    run.once("run", lambda: {"run_id": str(uuid.uuid4()), "definition": dict(definition)})
    return run


def find_run(home: Home, name: str) -> RunFolder:
    """The run with this folder name.

    Raises:
        OperatorError: there is none.
    """
    run = RunFolder(home.runs / name)
    if "/" in name or name.startswith(".") or not run.path.is_dir():
        raise OperatorError(f"expected the run {name} in {home.runs}, found none")
    return run


def list_runs(home: Home) -> list[RunFolder]:
    """All runs, the one that was begun first in front."""
    found = [RunFolder(path) for path in home.runs.iterdir() if (path / "run.json").is_file()]
    return sorted(found, key=lambda run: ((run.path / "run.json").stat().st_mtime_ns, run.name))


def prune_runs(home: Home, *, keep: set[str], newest: int = 5) -> list[str]:
    """Delete old runs but those in `keep` and the `newest` begun last; returns the names of the deleted."""
    runs = list_runs(home)
    deleted = [run for run in runs[: max(0, len(runs) - newest)] if run.name not in keep]
    for run in deleted:
        run.path.rename(run.path.with_name(f".deleted-{run.name}"))
    for path in home.runs.glob(".deleted-*"):
        shutil.rmtree(path)
    return [run.name for run in deleted]
