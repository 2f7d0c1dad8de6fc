"""A training run: its folder of durable results, its clock, and the inputs of its phases.

    run.json             package, data and options of the run, and its random id for reports
    data.json            all sources of the text so far, and examples of skipped rows
    learned.json         groups of a short text (`Document.group`), all of which have trained the state
    consent.json         number of withdrawals of consent when the run began, if its log or state is shared
    engine.json          engine of the run
    first-loss.json      loss of the start
    pace.json            time of a step and of an evaluation
    plan.json            epsilon, learning rate and number of steps
    descent-<n>.journal  step log of a zeroth-order descent (permille.zo.journal)
    descent-<n>.moments  Adam's state of a gradient descent
    descent-<n>.state    best state of a gradient descent (permille.zo.packed_state)
    descent-<n>.jsonl    losses on the select split, one line per evaluation
    kept.json            strength that keeps general knowledge, with the loss and the answers at it
    time.json, stop.json working time, and the step at which the time limit ended the run
    parts.json           choice among the base, the state, the memory and both
    memory.kv            memory of the chosen model (permille.engines.memory)
    losses-*.json        losses of each judged model on the test split, by piece of text
    incumbent.json       the model in use with which the state is compared
    decision-number.json number of the decision on this device
    decision.json        the decision, with its numbers and its reason
    state.i64            selected state at full strength, a cache of the journal's replay
    shared.log           log or packed state that the user shares, until the report is queued
    outcome.json         message for the user, and metrics of the report
    samples.json         text of the base and the personal model, for the page show.html

Each result is a function of the run's definition and of earlier results. It is written once and atomically,
before other results depend on it. If the model in use changes before the run ends, the decision is made
again. So a killed run that is started again computes only the missing results. All results have the same
bits as without the kill. Runs with a time limit are an exception: their number of steps depends on measured
times.
"""

import hashlib
import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from permille.package.basis import Basis
from permille.package.reader import Package
from permille.training.reference import Reference
from permille.zo.estimators import Batch, Descent, estimate
from permille.zo.header import BlockSplit, DirectionKind, LogHeader, Schedule
from permille.zo.lattice import values
from permille.zo.records import StepRecord
from permille.zo.steps import basis_step, rounded_step
from permille_agent.state.home import (
    Home,
    Record,
    encode_record,
    erase_folder,
    parse_record,
    read_record,
    write_record,
)
from permille_agent.text.preparation import Prepared
from permille_agent.text.rows import TrainingBatches
from permille_agent.training.engines import EXECUTORCH
from permille_agent.training.options import SPLIT_QUERIES, TrainOptions
from permille_agent.training.progress import SILENT, RunProgress


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss on the select split before step `step`. None replaces a loss that is not finite.

    A short text has no select split, so some training rows are evaluated instead.
    `seconds` is the working time of the run so far. It is only displayed, and does not affect the run.
    """

    step: int
    loss: float | None
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDefinition:
    """Inputs that determine the result of a run.

    Attributes:
        package: digest of the package.
        data: digest of the rows.
        options: options of the run.
        start: name of the run or the adopted round whose state is the start, or None for the base.
    """

    package: str
    data: str
    options: TrainOptions
    start: str | None = None

    def name(self) -> str:
        """Return the name of the run's folder, a hash. By this name, a repeated command finds its run."""
        definition: JSON = {
            "package": self.package,
            "data": self.data,
            "options": self.options.definition(),
            "start": self.start,
        }
        return hashlib.sha256(canonical_json(definition)).hexdigest()[:24]


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunRun:
    """Contents of `run.json`. `run_id` is the id of the run in its report."""

    run_id: str
    began_at: datetime
    definition: RunDefinition


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedText:
    """Contents of `learned.json`: groups of a short text, which judged the state and then trained it.

    These groups are left out when a later state is compared with this one.
    """

    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedTo:
    """Contents of a run's `consent.json`: the count of withdrawals when the user agreed to share."""

    withdrawals: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPoint:
    """Step before which the time limit ended a run."""

    descent: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Working time of a run."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run, below `runs/`. Get it from `open_run` or `find_run`."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the folder, by which the active model refers to the run."""
        return self.path.name

    @property
    def run_id(self) -> str:
        """Random id of the run in its report."""
        return self.require("run", BegunRun).run_id

    def load(self, name: str, kind: type[Record]) -> Record | None:
        """Return the result `name`, or None if it does not exist yet."""
        return read_record(self.path / f"{name}.json", kind)

    def require(self, name: str, kind: type[Record]) -> Record:
        """Return the result `name`.

        Raises:
            OperatorError: the result does not exist.
        """
        result = self.load(name, kind)
        if result is None:
            raise OperatorError(
                f"{self.path} has no {name}.json. Erase this run with `permille-agent forget --run "
                f"{self.path.name}`."
            )
        return result

    def store(self, name: str, result: object) -> None:
        """Write the result `name` atomically."""
        write_record(self.path / f"{name}.json", result)

    def once(self, name: str, kind: type[Record], compute: Callable[[], Record]) -> Record:
        """Return the result `name`. If it does not exist, compute and store it first.

        For example, `folder.once("first-loss", LossFound, measure)` measures on the first call only.
        """
        if (known := self.load(name, kind)) is None:
            self.store(name, compute())
            # Read back, so that a first call and a resumed run continue with the same value.
            known = self.require(name, kind)
        return known

    def discard(self, *names: str) -> None:
        """Delete results durably, in this order, so that they are computed again."""
        for name in names:
            (self.path / f"{name}.json").unlink(missing_ok=True)
            fsync_folder(self.path)

    def delete(self) -> None:
        """Erase the run, because its memory holds the user's text."""
        # The rename is atomic, so a kill leaves no incomplete run. After a kill, `prune_runs` deletes the
        # renamed folder.
        path = self.path.rename(self.path.with_name(f".deleted-{self.name}"))
        erase_folder(path)

    def begun(self, descent: int) -> bool:
        """Return whether a descent has begun, so that it has a journal or moments."""
        return self.journal(descent).exists() or self.moments(descent).exists()

    def moments(self, descent: int) -> Path:
        """Return the file of a gradient descent's moments and state."""
        return self.path / f"descent-{descent}.moments"

    def best_state(self, descent: int) -> Path:
        """Return the file of a gradient descent's best state (FORMAT 11)."""
        return self.path / f"descent-{descent}.state"

    @property
    def memory(self) -> Path:
        """Return the file of the run's memory (FORMAT 15)."""
        return self.path / "memory.kv"

    def journal(self, descent: int) -> Path:
        """Return the file of a descent's step log."""
        return self.path / f"descent-{descent}.journal"

    def evaluations(self, descent: int) -> list[Evaluation]:
        """Return all evaluations of a descent. An incomplete last line is removed from the file."""
        path = self._evaluations_path(descent)
        if not path.exists():
            return []
        data = path.read_bytes()
        # A kill during an append leaves part of a line.
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
        """Append an evaluation durably."""
        path = self._evaluations_path(descent)
        new = not path.exists()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(encode_record(evaluation) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        # The name of a new file is durable only after its folder is.
        if new:
            fsync_folder(self.path)

    def _evaluations_path(self, descent: int) -> Path:
        return self.path / f"descent-{descent}.jsonl"


def open_run(home: Home, definition: RunDefinition, began_at: datetime) -> RunFolder:
    """Open the folder of the run with this definition, or create it."""
    folder = RunFolder(home.runs / definition.name())
    if not folder.path.exists():
        folder.path.mkdir(mode=0o700)
        fsync_folder(home.runs)
    begun = BegunRun(run_id=str(uuid.uuid4()), began_at=began_at, definition=definition)
    folder.once("run", BegunRun, lambda: begun)
    return folder


def find_run(home: Home, name: str) -> RunFolder:
    """Return the run with this folder name.

    Raises:
        OperatorError: there is no such run.
    """
    folder = RunFolder(home.runs / name)
    # A name from a damaged file must not lead out of the folder of runs.
    if "/" in name or name.startswith(".") or not folder.path.is_dir():
        raise OperatorError(
            f"There is no run {name} in {home.runs}. `permille-agent status --json` names the newest run."
        )
    return folder


def named_run(home: Home, name: str) -> RunFolder:
    """Return the run whose folder or id begins with `name`.

    Raises:
        InputError: the name fits no run or several.
    """
    runs = [RunFolder(path) for path in home.runs.iterdir() if path.is_dir() and path.name[0] != "."]
    found = [run for run in runs if run.name.startswith(name) or _id_begins(run, name)]
    if not name or len(found) != 1:
        have = f"{len(found)} runs have names that begin" if found else "No run has a name that begins"
        raise InputError(f"{have} with {name!r:.60}. Name one of the folders in {home.runs}.")
    return found[0]


def list_runs(home: Home) -> list[RunFolder]:
    """Return all runs, the oldest first."""
    # A killed `delete` may leave a hidden folder with a `run.json`.
    found = [RunFolder(path.parent) for path in home.runs.glob("[!.]*/run.json")]
    # `run.json` is written only once, so its time of modification is the beginning of the run.
    return sorted(found, key=lambda run: ((run.path / "run.json").stat().st_mtime_ns, run.name))


def prune_runs(home: Home, *, keep: set[str], newest: int = 5) -> list[str]:
    """Delete all runs except the last `newest` ones and those in `keep`. Return the deleted names."""
    runs = list_runs(home)
    deleted = [run for run in runs[: max(0, len(runs) - newest)] if run.name not in keep]
    for run in deleted:
        run.delete()
    for path in home.runs.glob(".deleted-*"):  # left by a kill during `delete`
        erase_folder(path)
    return [run.name for run in deleted]


def _id_begins(run: RunFolder, name: str) -> bool:
    try:
        return run.run_id.startswith(name)
    except OperatorError:  # a damaged run can still be named by its folder
        return False


class RunClock:
    """Working time of a run across restarts, with its limit.

    The limit affects only the number of steps. The step at which the limit ended the run is stored, so that a
    run that is killed afterwards ends at the same step. A kill loses the time since the last `store`.
    """

    def __init__(self, folder: RunFolder, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._monotonic = monotonic
        self._before_s = (folder.load("time", TimeSpent) or TimeSpent()).seconds
        self._stop = folder.load("stop", StopPoint)
        self._start = monotonic()

    def seconds(self) -> float:
        """Return the working time in seconds."""
        return self._before_s + self._monotonic() - self._start

    def store(self) -> None:
        """Store the working time durably."""
        self._folder.store("time", TimeSpent(seconds=self.seconds()))

    def passed(self, descent: int, step: int, limit_s: float | None) -> bool:
        """Return whether the time limit has passed before this step. A `limit_s` of None means no limit."""
        if limit_s is None:
            return False
        if self._stop is None and self.seconds() >= limit_s:
            here = StopPoint(descent=descent, step=step)
            # Store the stop only once. The clock of a resumed run differs, and must not move the end.
            self._stop = self._folder.once("stop", StopPoint, lambda: here)
        # Later steps and later descents are beyond the stop, too.
        return self._stop is not None and (self._stop.descent, self._stop.step) <= (descent, step)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartState:
    """State that a run starts from, with the exponent of its unit.

    Attributes:
        is_candidate: whether the state itself may be the result of the run, because it was not judged yet.
    """

    s_K: NDArray[np.int64]
    step_unit_exponent: int
    is_candidate: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """Inputs of all phases of a run. Only the files in the folder and the clock change.

    Attributes:
        prepared: rows of the text.
        w_base_K: values of the masked weights in the base. The state is added to them.
        start: state before the first step, or None for the base.
        reference: general text of the package. It pulls steps towards the base, and measures forgetting.
        base_file: a file that keeps what the base does, for later runs (`evaluation.KnownBase`).
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
    base_file: Path | None = None

    @property
    def judges_start(self) -> bool:
        """True if the start itself is judged when no step improves it."""
        return self.start is not None and self.start.is_candidate and not self.prepared.stages

    def first_values(self) -> NDArray[np.float32]:
        """Return the values of the masked weights before the first step, float32 [k]."""
        if self.start is None:
            return self.w_base_K
        return values(self.w_base_K, self.start.s_K, self.start.step_unit_exponent)

    @cached_property
    def batches(self) -> TrainingBatches:
        """Batches of the run, by step."""
        options = self.options
        return TrainingBatches(self.prepared.train, batch_rows=options.batch_rows, seed=options.seed)

    def pull(self, step: int) -> Batch | None:
        """Return the rows that pull a step towards the base. None means no pull.

        Without general text in the package, there is no pull. Runs with ExecuTorch have none either, because
        its programs do not support soft targets. In these runs, only the strength limits the loss on general
        text.
        """
        if self.reference is None or self.engine.info()["name"] == EXECUTORCH:
            return None
        return self.reference.pull(step)

    @cached_property
    def first_tensor(self) -> int:
        """Index of the first trained tensor.

        Raises:
            InputError: neither this tensor nor a later one has masked weights.
        """
        counts, first = self.package.counts, self.options.first_layer
        # Every decoder layer has the same number of items in `counts`.
        tensor = first * (len(counts) // int(self.package.config["num_hidden_layers"]))
        if not sum(counts[tensor:]):
            raise InputError(f"No masked weight is in layer {first} or above. Name a lower --first-layer.")
        return tensor

    @property
    def trained(self) -> slice:
        """Slice of the trained weights among all masked weights."""
        return slice(sum(self.package.counts[: self.first_tensor]), self.package.k)

    @cached_property
    def basis(self) -> Basis | None:
        """Basis of the package, if the steps of this run can use it. Its steps have the user's scale."""
        fits = self.options.estimator is EstimatorKind.ONE_SIDED and not self.first_tensor
        basis = self.package.basis() if fits else None
        scale = self.options.rate_scale
        return None if basis is None else replace(basis, length=scale * basis.length)

    def descent(
        self,
        *,
        seed: int,
        epsilon: float = 1.0,
        learning_rate: float = 1.0,
        total_steps: int = 1,
        schedule: Schedule = Schedule.CONSTANT,
        basis_steps: int = 0,
    ) -> Descent:
        """Return the description of a descent. Its step unit must still be fitted."""
        split, options = None, self.options
        groups = options.estimator in (EstimatorKind.GRADIENT, EstimatorKind.ONE_SIDED)
        if options.estimator is EstimatorKind.SPLIT:
            decoder_layers = int(self.package.config["num_hidden_layers"])
            lower = options.queries // SPLIT_QUERIES
            split = BlockSplit.halving(self.package.counts, decoder_layers, lower, options.first_layer)
        header = LogHeader(
            package_digest=self.package.digest,
            mask_digest=self.package.mask_digest,
            seed=seed,
            estimator=options.estimator,
            directions=DirectionKind.GROUPS if groups else DirectionKind.RADEMACHER,
            queries=max(1, options.queries),
            epsilon=epsilon,
            learning_rate=learning_rate,
            schedule=schedule,
            total_steps=total_steps,
            step_unit_exponent=0,
            counts=self.package.counts,
            split=split,
            # A gradient run has no log. It sets the gradient of layers below `first_layer` to 0
            # (`durable_steps`).
            first_tensor=self.first_tensor if options.has_log else 0,
            basis_steps=basis_steps,
        )
        return Descent(header=header, w_base_K=self.w_base_K, basis=self.basis)

    def take_step(
        self, descent: Descent, s_K: NDArray[np.int64], step: int, before: Sequence[int] = ()
    ) -> StepRecord:
        """Compute a zeroth-order step from the state `s_K`, which is not changed.

        Args:
            before: coefficients of the step before, which a step in a basis continues.
        """
        loss, projected_grad_Q = estimate(self.engine, self.batches(step), descent, s_K, step)
        if (pull := self.pull(step)) is not None:
            _, pull_Q = estimate(self.engine, pull, descent, s_K, step)
            # Projected gradients are linear in the loss, so those of both batches can be added.
            projected_grad_Q = projected_grad_Q + pull_Q
        if step < descent.header.basis_steps:
            return basis_step(loss, projected_grad_Q, descent, step, before)
        return rounded_step(loss, projected_grad_Q, descent.header, step, normalised=True)


def finite_or_none(number: float) -> float | None:
    """Return `number`, or None if it is not finite, because JSON can store only finite numbers.

    Example:
        >>> finite_or_none(1.5), finite_or_none(math.nan)
        (1.5, None)
    """
    return number if math.isfinite(number) else None
