"""A training run: its folder of durable results, its clock, and what its phases work with.

    run.json             what the run is: package, data, options; its random id for reports
    data.json            where the text came from, and rows that were left out
    learned.json         of little text, all of which trains: its groups by their hashes
    consent.json         where its log is to be shared: which consent that is
    engine.json          the engine that the run computes with, to its end
    search-*.json        results of the search, thrown-away steps included
    plan.json            epsilon, step size, number of steps: written before the first step
    descent-<n>.journal  the step log of descent n (permille.zo.journal)
    descent-<n>.moments  what Adam remembers of descent n, where its steps follow a gradient
    descent-<n>.state    the best state of descent n, where its steps are no log (permille.zo.packed_state)
    descent-<n>.jsonl    losses on the select split, one line an evaluation
    general.json         the loss on the package's reference, and the strength that keeps it low
    time.json, stop.json how long the run has worked, and where its time limit ended it
    losses-*.json        losses by document of the test split
    decision.json        which step, which state at which strength, adopted or not, and why
    state.i64            the selected state as it was trained, a cache of the journal's replay
    shared.log           the log or the packed state, where the user shares it, until the report is queued
    outcome.json         the end: what the user is told, and the metrics of the report

A result is a function of the run's definition and of earlier results. It is written once, whole, before
anything depends on it. So a run that is killed anywhere and started again computes what is missing and ends
with the same bits; what was written is never computed again.
"""

import hashlib
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.digests import JSON, canonical_json
from permille.engines.interface import Engine
from permille.errors import InputError, OperatorError
from permille.files import fsync_folder
from permille.package.reader import Package
from permille.training.reference import Reference
from permille.zo.estimators import Batch, Descent, estimate
from permille.zo.header import BlockSplit, DirectionKind, LogHeader, Schedule
from permille.zo.lattice import values
from permille.zo.records import StepRecord
from permille.zo.steps import rounded_step
from permille_agent.state.home import Home, Record, encode_record, parse_record, read_record, write_record
from permille_agent.text.preparation import Prepared
from permille_agent.text.rows import TrainingBatches
from permille_agent.training.engines import EXECUTORCH
from permille_agent.training.options import SPLIT_QUERIES, TrainOptions
from permille_agent.training.progress import SILENT, RunProgress


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss on the select split before step `step`; None where it was not finite.

    `seconds` is how long the run had worked by then: it is told, and decides nothing.
    """

    step: int
    loss: float | None
    seconds: float = field(default=0.0, compare=False)


# No run has this name.
POOLED_START = "pooled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDefinition:
    """Inputs that determine the result of a run.

    Attributes:
        package: its digest.
        data: the digest of its rows.
        start: the run whose state it goes on from, or `POOLED_START`; None is the base.
    """

    package: str
    data: str
    options: TrainOptions
    start: str | None = None

    def name(self) -> str:
        """Return the name of the run's folder. It lets the same command find its run after a crash."""
        options = self.options.definition()
        definition: JSON = {
            "package": self.package,
            "data": self.data,
            "options": options,
            "start": self.start,
        }
        return hashlib.sha256(canonical_json(definition)).hexdigest()[:24]


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunRun:
    """Contents of `run.json`. The service knows a reported run by its `run_id`.

    `began_at` is by this device's clock: it is told, and decides nothing here.
    """

    run_id: str
    began_at: datetime
    definition: RunDefinition


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedText:
    """Contents of `learned.json`: groups that judged the state and then trained it.

    They never judge against that state again.
    """

    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedTo:
    """Contents of a run's `consent.json`: the count of withdrawals when the user consented."""

    withdrawals: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPoint:
    """Point at which a time limit ended a run: before this step of this descent."""

    descent: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Seconds that a run has worked."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder below `runs/`. Make it with `open_run` or `find_run`."""

    path: Path

    @property
    def name(self) -> str:
        """The folder's name, by which the active model refers to the run."""
        return self.path.name

    @property
    def run_id(self) -> str:
        """The random id by which the service knows the run."""
        return self.require("run", BegunRun).run_id

    def load(self, name: str, kind: type[Record]) -> Record | None:
        """Read the result `name`; None where it is not there yet."""
        return read_record(self.path / f"{name}.json", kind)

    def require(self, name: str, kind: type[Record]) -> Record:
        """Read the result `name`.

        Raises:
            OperatorError: it is not there.
        """
        result = self.load(name, kind)
        if result is None:
            raise OperatorError(
                f"{self.path} has no {name}.json. Erase this run with `permille-agent forget --run "
                f"{self.path.name}`."
            )
        return result

    def store(self, name: str, result: object) -> None:
        """Write the result `name`, whole or not at all."""
        write_record(self.path / f"{name}.json", result)

    def once(self, name: str, kind: type[Record], compute: Callable[[], Record]) -> Record:
        """Return the result `name`: read where it is there, else computed, written, and read back."""
        if (known := self.load(name, kind)) is None:
            self.store(name, compute())
            known = self.require(name, kind)
        return known

    def delete(self) -> None:
        """Delete the run: all of it, or the folder's old name at least."""
        path = self.path.rename(self.path.with_name(f".deleted-{self.name}"))
        shutil.rmtree(path)

    def begun(self, descent: int) -> bool:
        """Return whether a descent has begun, that is, has a log or moments."""
        return self.journal(descent).exists() or self.moments(descent).exists()

    def moments(self, descent: int) -> Path:
        """Return the file of a descent's Adam moments, and of its state if it has no log."""
        return self.path / f"descent-{descent}.moments"

    def best_state(self, descent: int) -> Path:
        """Return the file of a descent's best state, if it has no log (FORMAT 11)."""
        return self.path / f"descent-{descent}.state"

    def journal(self, descent: int) -> Path:
        """Return the file of a descent's step log."""
        return self.path / f"descent-{descent}.journal"

    def evaluations(self, descent: int) -> list[Evaluation]:
        """Read all whole evaluations of a descent; a torn last line is cut off."""
        path = self._evaluations_path(descent)
        if not path.exists():
            return []
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
                os.fsync(file.fileno())
        return [
            parse_record(line, Evaluation, f"line {number} of {path}")
            for number, line in enumerate(whole.splitlines(), start=1)
        ]

    def append_evaluation(self, descent: int, evaluation: Evaluation) -> None:
        """Add one evaluation; durable on return."""
        path = self._evaluations_path(descent)
        new = not path.exists()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(encode_record(evaluation) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            fsync_folder(self.path)

    def _evaluations_path(self, descent: int) -> Path:
        return self.path / f"descent-{descent}.jsonl"


def open_run(home: Home, definition: RunDefinition, began_at: datetime) -> RunFolder:
    """Open the folder of the run with this definition: the one that was begun, or a new one of now."""
    folder = RunFolder(home.runs / definition.name())
    if not folder.path.exists():
        folder.path.mkdir(mode=0o700)
        fsync_folder(home.runs)
    begun = BegunRun(run_id=str(uuid.uuid4()), began_at=began_at, definition=definition)
    folder.once("run", BegunRun, lambda: begun)
    return folder


def find_run(home: Home, name: str) -> RunFolder:
    """Find the run with this folder name.

    Raises:
        OperatorError: there is none.
    """
    folder = RunFolder(home.runs / name)
    if "/" in name or name.startswith(".") or not folder.path.is_dir():
        raise OperatorError(f"There is no run {name} in {home.runs}. `permille-agent status` names the runs.")
    return folder


def named_run(home: Home, name: str) -> RunFolder:
    """Find the one run that a user names: by its folder or its id in reports, or how either begins.

    Raises:
        InputError: there is none, or more than one.
    """
    runs = [RunFolder(path) for path in home.runs.iterdir() if path.is_dir() and path.name[0] != "."]
    found = [run for run in runs if run.name.startswith(name) or _id_begins(run, name)]
    if not name or len(found) != 1:
        raise InputError(f"{len(found)} runs have names that begin with {name!r:.60}. Give the name of one.")
    return found[0]


def list_runs(home: Home) -> list[RunFolder]:
    """List all runs, the one that was begun first in front."""
    found = [RunFolder(path) for path in home.runs.iterdir() if (path / "run.json").is_file()]
    return sorted(found, key=lambda run: ((run.path / "run.json").stat().st_mtime_ns, run.name))


def prune_runs(home: Home, *, keep: set[str], newest: int = 5) -> list[str]:
    """Delete old runs but those in `keep` and the `newest` begun last; returns the names of the deleted."""
    runs = list_runs(home)
    deleted = [run for run in runs[: max(0, len(runs) - newest)] if run.name not in keep]
    for run in deleted:
        run.delete()
    for path in home.runs.glob(".deleted-*"):  # a kill between a name and its files
        shutil.rmtree(path)
    return [run.name for run in deleted]


def _id_begins(run: RunFolder, name: str) -> bool:
    try:
        return run.run_id.startswith(name)
    except OperatorError:  # damaged; its folder still has a name
        return False


class RunClock:
    """Working time of a run across restarts, with its limit.

    A time limit decides how many steps a run makes, never what a step is. Where it ended is durable, so that
    a run that is killed after its time ends at the same step. A kill loses the time since the last `store`.
    """

    def __init__(self, folder: RunFolder, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._monotonic = monotonic
        self._before_s = (folder.load("time", TimeSpent) or TimeSpent()).seconds
        self._stop = folder.load("stop", StopPoint)
        self._start = monotonic()

    def seconds(self) -> float:
        """Seconds that the run has worked."""
        return self._before_s + self._monotonic() - self._start

    def store(self) -> None:
        """Make the time spent durable."""
        self._folder.store("time", TimeSpent(seconds=self.seconds()))

    def passed(self, descent: int, step: int, limit_s: float | None) -> bool:
        """Return whether the time is over before this step. None means no limit."""
        if limit_s is None:
            return False
        if self._stop is None and self.seconds() >= limit_s:
            here = StopPoint(descent=descent, step=step)
            self._stop = self._folder.once("stop", StopPoint, lambda: here)
        return self._stop is not None and (self._stop.descent, self._stop.step) <= (descent, step)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartState:
    """A state to go on from, on its own unit.

    Attributes:
        is_candidate: nobody has judged it on this device yet: alone it may be what the run ends with.
    """

    s_K: NDArray[np.int64]
    step_unit_exponent: int
    is_candidate: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """Inputs of every phase of a run. Only the folder's files and the clock change.

    Attributes:
        prepared: the rows of its text.
        w_base_K: the sparse values that the state is added to.
        start: the state that the first step begins from; None is the base.
        reference: what the package carries of general text, to pull and to measure with.
    """

    folder: RunFolder
    clock: RunClock
    package: Package
    engine: Engine
    w_base_K: NDArray[np.float32]
    prepared: Prepared
    options: TrainOptions
    progress: RunProgress = SILENT
    start: StartState | None = None
    reference: Reference | None = None

    @property
    def judges_start(self) -> bool:
        """Return whether the starting state is judged if no step improved on it."""
        return self.start is not None and self.start.is_candidate and not self.prepared.stages

    def first_values(self) -> NDArray[np.float32]:
        """Compute the sparse values that the first step begins from, float32 [k]."""
        if self.start is None:
            return self.w_base_K
        return values(self.w_base_K, self.start.s_K, self.start.step_unit_exponent)

    @cached_property
    def batches(self) -> TrainingBatches:
        """The batch of each step."""
        options = self.options
        return TrainingBatches(self.prepared.train, batch_rows=options.batch_rows, seed=options.seed)

    def pull(self, step: int) -> Batch | None:
        """Take the rows that pull a step towards the base; None where there are none.

        Programs of ExecuTorch have no soft targets: there the strength alone keeps what the base knows.
        """
        if self.reference is None or self.engine.info()["name"] == EXECUTORCH:
            return None
        return self.reference.pull(step)

    @cached_property
    def first_tensor(self) -> int:
        """The first tensor that is trained.

        Raises:
            InputError: no weight from there on is masked.
        """
        counts, first = self.package.counts, self.options.first_layer
        tensor = first * (len(counts) // int(self.package.config["num_hidden_layers"]))
        if not sum(counts[tensor:]):
            raise InputError(f"No masked weight is in layer {first} or above. Name a lower --first-layer.")
        return tensor

    @property
    def trained(self) -> slice:
        """Return the positions of the trained masked weights in flat order."""
        return slice(sum(self.package.counts[: self.first_tensor]), self.package.k)

    def descent(
        self,
        *,
        seed: int,
        epsilon: float,
        learning_rate: float = 1.0,
        total_steps: int = 1,
        schedule: Schedule = Schedule.CONSTANT,
    ) -> Descent:
        """Describe steps from the base; the step unit is not fitted yet."""
        split, estimator = None, self.options.estimator
        groups = estimator in (EstimatorKind.GRADIENT, EstimatorKind.ONE_SIDED)
        if self.options.estimator is EstimatorKind.SPLIT:
            decoder_layers = int(self.package.config["num_hidden_layers"])
            lower = self.options.queries // SPLIT_QUERIES
            first = self.options.first_layer
            split = BlockSplit.halving(self.package.counts, decoder_layers, lower, first)
        header = LogHeader(
            package_digest=self.package.digest,
            mask_digest=self.package.mask_digest,
            seed=seed,
            estimator=self.options.estimator,
            directions=DirectionKind.GROUPS if groups else DirectionKind.RADEMACHER,
            queries=max(1, self.options.queries),
            epsilon=epsilon,
            learning_rate=learning_rate,
            schedule=schedule,
            total_steps=total_steps,
            step_unit_exponent=0,
            counts=self.package.counts,
            split=split,
            first_tensor=self.first_tensor if self.options.has_log else 0,
        )
        return Descent(header=header, w_base_K=self.w_base_K)

    def take_step(self, descent: Descent, s_K: NDArray[np.int64], step: int) -> StepRecord:
        """Compute one step from state `s_K` on its batch, pulled by the reference; the state stays as it is.

        Scalars are linear in the losses, so those of both batches along the same directions are added.
        """
        loss, projected_grad_Q = estimate(self.engine, self.batches(step), descent, s_K, step)
        if (pull := self.pull(step)) is not None:
            _, pull_Q = estimate(self.engine, pull, descent, s_K, step)
            projected_grad_Q = projected_grad_Q + pull_Q
        return rounded_step(loss, projected_grad_Q, descent.header, step, normalised=True)


def widest_block(header: LogHeader) -> int:
    """Count the most directions that a block has: their coefficients are the smallest."""
    sizes: list[int] = [queries.stop - queries.start for queries, _ in header.blocks()]
    return max(sizes)


def finite_or_none(number: float) -> float | None:
    """Return `number` as JSON can hold it: there is no word for what is not finite but null."""
    return number if math.isfinite(number) else None
