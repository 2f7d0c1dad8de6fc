"""Options and context of a training run.

The defaults of the options need no tuning (docs/adr/0009, 0030).
"""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from permille.choices import EstimatorKind, Method
from permille.digests import JSON
from permille.errors import InputError
from permille.training.strength import KEEP_GENERAL
from permille_agent.text.documents import Learn
from permille_agent.training.engines import ANY_ENGINE, AUTO, EXECUTORCH, OpenEngine
from permille_agent.training.progress import SILENT, RunProgress

DEFAULT_MINUTES = 30.0
DEFAULT_ESTIMATOR = EstimatorKind.GRADIENT
# Directions a step at about the cost of SPSA's eight in forward passes (docs/adr/0009).
DEFAULT_QUERIES = {
    EstimatorKind.GRADIENT: 0,
    EstimatorKind.SPSA: 8,
    EstimatorKind.FORWARD: 8,
    EstimatorKind.ONE_SIDED: 16,
    EstimatorKind.SPLIT: 15,
}
# Rows a step: along a gradient, several; for losses alone, more directions are worth more than more rows.
DEFAULT_ROWS = {kind: 4 if kind is EstimatorKind.GRADIENT else 2 for kind in DEFAULT_QUERIES}
_ESTIMATORS = {kind.value: kind for kind in DEFAULT_QUERIES if kind is not EstimatorKind.GRADIENT}
# FedSPZO's 2 lower and 8 upper directions: of five directions of a split, one is the lower block's.
SPLIT_QUERIES = 5


class Start(StrEnum):
    """Start of a run.

    `ACTIVE` starts at the active model if it has the package's values, else at the package's pooled
    state, else at the base.
    """

    ACTIVE = "active"
    POOLED = "pooled"
    BASE = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of a run.

    Attributes:
        seed: of batches and directions.
        steps: how many steps; such a run is exactly reproducible on the same machine and threads.
        minutes: how long, search and judgement included; the number of steps is then what the time gives.
        estimator: `GRADIENT` follows that of a reverse pass; the others are zeroth order.
        queries: directions a step of zeroth order, of both blocks together where there are two. Along the
            gradient 0: every weight moves by its own integer, and there is no log, but a state.
        start: without a log, a run may go on from a state; the others begin at the base.
        batch_rows: rows a step.
        row_tokens: longest row.
        learn: whose turns of a conversation count in the loss; other documents are learned whole.
        rate_scale: multiplies the learning rate; less than 1 where training diverges.
        first_layer: the masked weights of this decoder layer and those above it are trained, no others.
        keep_general: how much the loss on the package's reference may rise, nats per token.
    """

    seed: int = 0
    steps: int | None = None
    minutes: float | None = None
    estimator: EstimatorKind = DEFAULT_ESTIMATOR
    queries: int = DEFAULT_QUERIES[DEFAULT_ESTIMATOR]
    batch_rows: int = DEFAULT_ROWS[DEFAULT_ESTIMATOR]
    row_tokens: int = 128
    start: Start = Start.ACTIVE
    learn: Learn = Learn.ASSISTANT
    rate_scale: float = 1.0
    first_layer: int = 0
    keep_general: float = KEEP_GENERAL

    def __post_init__(self) -> None:
        """Refuse what no run can have.

        Raises:
            InputError: which number was expected and which came.
        """
        if (self.steps is None) == (self.minutes is None):
            raise InputError("Give either --steps or --minutes.")
        if self.steps is not None and not 1 <= self.steps <= 1_000_000:
            raise InputError(f"--steps must be 1 to 1,000,000, got {self.steps}")
        if self.minutes is not None and not 0 < self.minutes <= 10_080:
            raise InputError(f"--minutes must be above 0 and at most 10,080, got {self.minutes}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed must be 0 to 2**63 - 1, got {self.seed}")
        if self.method is Method.GRADIENT and self.queries:
            raise InputError(
                f"A gradient run takes no queries, got {self.queries}. Leave --queries out, or train with "
                "--method zeroth-order."
            )
        if self.method is Method.ZEROTH_ORDER and not 1 <= self.queries <= 256:
            raise InputError(f"--queries must be 1 to 256, got {self.queries}")
        if not 1 <= self.batch_rows <= 256:
            raise InputError(f"--rows must be 1 to 256, got {self.batch_rows}")
        if self.estimator is EstimatorKind.ONE_SIDED and self.queries < 2:
            raise InputError(f"--queries must be at least 2 for one-sided, got {self.queries}")
        if self.estimator is EstimatorKind.SPLIT and self.queries % SPLIT_QUERIES:
            raise InputError(f"--queries must be a multiple of {SPLIT_QUERIES} for split, got {self.queries}")
        if not 8 <= self.row_tokens <= 8192:
            raise InputError(f"--row-tokens must be 8 to 8,192, got {self.row_tokens}")
        if not 0 < self.rate_scale <= 16:
            raise InputError(f"--rate-scale must be above 0 and at most 16, got {self.rate_scale}")
        if not 0 <= self.first_layer <= 1000:
            raise InputError(f"--first-layer must be 0 to 1,000, got {self.first_layer}")
        if not 0 <= self.keep_general <= 100:
            raise InputError(f"--keep-general must be 0 to 100 nats per token, got {self.keep_general}")

    @classmethod
    def of(
        cls, estimator: EstimatorKind, *, queries: int | None = None, rows: int | None = None, **others: Any
    ) -> Self:
        """Return the options of an estimator, with its defaults for what is None."""
        return cls(
            estimator=estimator,
            queries=DEFAULT_QUERIES[estimator] if queries is None else queries,
            batch_rows=DEFAULT_ROWS[estimator] if rows is None else rows,
            **others,
        )

    @property
    def method(self) -> Method:
        """The method of the estimator."""
        return Method.GRADIENT if self.estimator is EstimatorKind.GRADIENT else Method.ZEROTH_ORDER

    @property
    def has_log(self) -> bool:
        """Return whether the run writes a log of seeds and scalars, as zeroth order does."""
        return self.method is Method.ZEROTH_ORDER

    def within(self, positions: int) -> "TrainOptions":
        """Return the same choices, with rows no longer than the model's `positions`."""
        return replace(self, row_tokens=min(self.row_tokens, positions))

    def definition(self) -> JSON:
        """Return the choices that a run's digest includes. All of them affect its result.

        Canonical JSON has no fractions, so these are text.
        """
        fractions = {
            "minutes": None if self.minutes is None else repr(self.minutes),
            "rate_scale": repr(float(self.rate_scale)),
            "keep_general": repr(float(self.keep_general)),
        }
        names = {"estimator": self.estimator.value, "start": self.start.value, "learn": self.learn.value}
        return {**asdict(self), **names, **fractions}


def utc_now() -> datetime:
    """Read the clock of this device."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Context of a run. Only its engine can change the result.

    Attributes:
        share_log: put the log of the selected state beside the outcome, to be uploaded with the report.
        share_state: the same of the packed state, where no log is shared.
        withdrawals: how often consent had been withdrawn when the user agreed to that.
        stop: once set, the run stops within one call of the engine, resumable.
        progress: told what happens.
        now: the time of day, for the report.
        engine_of: opens an engine on a package. A run that goes on keeps its engine; an active model of
            another package is opened with what fits it.
    """

    share_log: bool = False
    share_state: bool = False
    withdrawals: int = 0
    stop: threading.Event | None = None
    progress: RunProgress = SILENT
    now: Callable[[], datetime] = utc_now
    engine_of: OpenEngine = ANY_ENGINE


def choose_method(
    asked: Method | None, *, share_log: bool = False, release: Method | None = None, engine: str = AUTO
) -> Method:
    """Choose the method of a run, by the first of these that says one.

    - The device's owner, on the command line or in the policy.
    - A log that is to be shared: only zeroth order has one.
    - An engine without a reverse pass (ExecuTorch's programs): it has zeroth order alone.
    - The installed release.
    - Else the gradient.

    Args:
        asked: what the owner says.
        share_log: the owner shares logs.
        release: what the installed release says, signed.
        engine: its name.
    """
    if asked is not None:
        return asked
    if share_log or engine == EXECUTORCH:
        return Method.ZEROTH_ORDER
    return release or Method.GRADIENT


def estimator_of(method: Method, name: str | None = None, *, engine: str = AUTO) -> EstimatorKind:
    """Find the estimator of a method: the one that a user names, or its default.

    A name may have a hyphen or an underscore.
    An engine that has losses alone takes both signs in one pass, so its default is two-sided.

    Raises:
        InputError: the method has no such estimator.
    """
    if method is Method.GRADIENT:
        if name is not None:
            raise InputError(
                f"{name!r:.60} is no estimator of a gradient run. Leave --estimator out, or add "
                "--method zeroth-order."
            )
        return EstimatorKind.GRADIENT
    if name is None:
        return EstimatorKind.SPSA if engine == EXECUTORCH else EstimatorKind.ONE_SIDED
    try:
        return _ESTIMATORS[name.replace("-", "_")]
    except KeyError:
        known = ", ".join(_ESTIMATORS).replace("_", "-")
        raise InputError(f"There is no estimator {name!r:.60}. Choose one of {known}.") from None
