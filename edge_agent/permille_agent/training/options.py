"""Options and context of a training run.

The defaults of the options need no tuning (docs/adr/0009, 0030).
"""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from permille.choices import EngineName, EstimatorKind, Method
from permille.digests import JSON
from permille.engines.memory import MAX_TOKENS
from permille.errors import InputError
from permille.training.strength import KEEP_GENERAL
from permille.trust.roles import Training
from permille_agent.text.documents import Learn
from permille_agent.training.engines import ANY_ENGINE, AUTO, EXECUTORCH, OpenEngine
from permille_agent.training.progress import SILENT, RunProgress

DEFAULT_MINUTES = 30.0
MOST_MINUTES = 10_080
DEFAULT_MEMORY = 1024
# A smaller memory has no room for BOS, a separator and text.
LEAST_MEMORY = 16
DEFAULT_ESTIMATOR = EstimatorKind.GRADIENT
# Directions per step. With these numbers, a step of SPSA, one-sided or split costs about 16 forward passes.
# A step of `forward` always costs about 3 (`permille.zo.estimators`).
DEFAULT_QUERIES = {
    EstimatorKind.GRADIENT: 0,
    EstimatorKind.SPSA: 8,
    EstimatorKind.FORWARD: 8,
    EstimatorKind.ONE_SIDED: 16,
    EstimatorKind.SPLIT: 15,
}
# Rows per step. In zeroth order, additional directions help more than additional rows.
DEFAULT_ROWS = {kind: 4 if kind is EstimatorKind.GRADIENT else 2 for kind in DEFAULT_QUERIES}
_ESTIMATORS = {kind.value: kind for kind in DEFAULT_QUERIES if kind is not EstimatorKind.GRADIENT}
# FedSPZO uses 2 directions for the lower block of layers and 8 for the upper one. So 1 direction in 5 belongs
# to the lower block.
SPLIT_QUERIES = 5
# Smallest and largest value of each numeric option.
_RANGES = {
    "steps": (1, 1_000_000),
    "seed": (0, 2**63 - 1),
    "batch_rows": (1, 256),
    "row_tokens": (8, 8192),
    "first_layer": (0, 1000),
    "keep_general": (0, 100),
}


class Start(StrEnum):
    """Model that a run starts from.

    `ACTIVE` is the active model if it belongs to the package, else `ROUND`, the state of the adopted
    round, else the base. `personal.find_start` makes exceptions, for example for short texts.
    """

    ACTIVE = "active"
    ROUND = "round"
    BASE = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of a run.

    For example, a run of 20 minutes with the defaults, and a reproducible run of 500 steps:

        TrainOptions(minutes=20)
        TrainOptions(steps=500, seed=1)

    Attributes:
        seed: seed of the batches and the directions.
        steps: number of steps. On the same machine with the same number of threads, a run of a fixed number
            of steps is reproducible to the bit.
        minutes: duration of the run, including the judgement.
        estimator: `GRADIENT` uses a reverse pass. All other estimators are zeroth order.
        queries: directions per zeroth-order step. For `SPLIT`, the sum over both blocks. 0 for `GRADIENT`.
        start: model to start from. Zeroth-order runs always start at the base.
        batch_rows: rows per step.
        row_tokens: length of the longest row.
        learn: roles whose turns of a conversation count in the loss. It has no effect on other documents.
        rate_scale: factor of the learning rate. Use less than 1 if training diverges.
        first_layer: first decoder layer whose masked weights are trained.
        keep_general: largest allowed rise of the loss on general text, in nats per token.
        memory: largest number of positions of the memory, at least 16. 0 makes none.
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
    memory: int = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        """Check the ranges of the options, and which options go together.

        Raises:
            InputError: an option is out of range, or the method cannot use it.
        """
        if (self.steps is None) == (self.minutes is None):
            raise InputError("Give either --steps or --minutes.")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                flag = "--rows" if name == "batch_rows" else f"--{name.replace('_', '-')}"
                raise InputError(f"{flag} must be {least:,} to {most:,}, got {value}")
        # Ranges with an open lower end, which the table above cannot express.
        if self.minutes is not None and not 0 < self.minutes <= MOST_MINUTES:
            raise InputError(f"--minutes must be above 0 and at most {MOST_MINUTES:,}, got {self.minutes}")
        if self.memory and not LEAST_MEMORY <= self.memory <= MAX_TOKENS:
            raise InputError(f"--memory must be 0, or {LEAST_MEMORY} to {MAX_TOKENS:,}, got {self.memory}")
        if not 0 < self.rate_scale <= 16:
            raise InputError(f"--rate-scale must be above 0 and at most 16, got {self.rate_scale}")
        if self.method is Method.GRADIENT and self.queries:
            raise InputError(
                f"A gradient run takes no queries, got {self.queries}. Leave --queries out, or train with "
                "--method zeroth-order."
            )
        if self.method is Method.ZEROTH_ORDER and not 1 <= self.queries <= 256:
            raise InputError(f"--queries must be 1 to 256, got {self.queries}")
        if self.estimator is EstimatorKind.ONE_SIDED and self.queries < 2:
            raise InputError(f"--queries must be at least 2 for one-sided, got {self.queries}")
        if self.estimator is EstimatorKind.SPLIT and self.queries % SPLIT_QUERIES:
            raise InputError(f"--queries must be a multiple of {SPLIT_QUERIES} for split, got {self.queries}")

    @classmethod
    def of(
        cls, estimator: EstimatorKind, *, queries: int | None = None, rows: int | None = None, **others: Any
    ) -> Self:
        """Return the options of an estimator. None for `queries` or `rows` means the estimator's default.

        Example:
            >>> TrainOptions.of(EstimatorKind.SPSA, steps=100).queries
            8
        """
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

    def within(self, positions: int, beside: int = 0, memory: int = MAX_TOKENS) -> "TrainOptions":
        """Return these options with rows and a memory that fit into the model's `positions`.

        A memory takes at most half of the positions, because a conversation needs the others.

        Args:
            positions: positions of the model.
            beside: positions of the active model's memory. The rows that judge a run follow it, too.
            memory: largest memory of the model.
        """
        row_tokens = min(self.row_tokens, positions - beside)
        memory = min(self.memory, memory, positions // 2, positions - row_tokens)
        return replace(self, row_tokens=row_tokens, memory=memory if memory >= LEAST_MEMORY else 0)

    def definition(self) -> JSON:
        """Return the options as JSON for the digest of the run. All options affect the result of a run."""
        # Canonical JSON has no fractions, so fractions become text.
        fractions = {
            "minutes": None if self.minutes is None else repr(self.minutes),
            "rate_scale": repr(float(self.rate_scale)),
            "keep_general": repr(float(self.keep_general)),
        }
        names = {"estimator": self.estimator.value, "start": self.start.value, "learn": self.learn.value}
        return {**asdict(self), **names, **fractions}


def utc_now() -> datetime:
    """Return the current time of this device's clock."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Context of a run. Of these attributes, only the engine can change the result of the run.

    For example, a run that another thread can stop:

        stop = threading.Event()
        run_training(home, paths, TrainOptions(minutes=20), RunContext(stop=stop))

    Attributes:
        share_log: upload the log of the selected state with the report.
        share_state: upload the packed state with the report if no log is uploaded.
        withdrawals: number of withdrawals of consent when the user agreed to share.
        stop: set this event to stop the run. The same call resumes it.
        progress: receives the progress of the run.
        now: returns the current time, for the report.
        engine_of: opens an engine for a package. A resumed run keeps its engine.
    """

    share_log: bool = False
    share_state: bool = False
    withdrawals: int = 0
    stop: threading.Event | None = None
    progress: RunProgress = SILENT
    now: Callable[[], datetime] = utc_now
    engine_of: OpenEngine = ANY_ENGINE


def options_for(
    training: Training,
    *,
    engine: str,
    share_log: bool,
    method: Method | None = None,
    estimator: str | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    first_layer: int | None = None,
    memory: int | None = None,
    **others: Any,
) -> TrainOptions:
    """Return the options of a run. The user's options come first, then the release's, then the defaults.

    Args:
        training: options in the installed release, which is signed.
        engine: name of the engine.
        share_log: whether the user shares logs.
        memory: largest number of positions of the memory. None is the default of the engine.
        others: other fields of `TrainOptions.of`.

    Raises:
        InputError: an option is out of range, the method has no such estimator, or the engine no memory.
    """
    if memory and engine in (EngineName.TORCH, EXECUTORCH):
        raise InputError(f"The engine {engine} cannot compute a memory. Leave --memory out, or use light.")
    if memory is None:
        memory = 0 if engine in (EngineName.TORCH, EXECUTORCH) else DEFAULT_MEMORY
    # All estimators that a user can name are zeroth order.
    if method is None and estimator is not None:
        method = Method.ZEROTH_ORDER
    method = choose_method(method, share_log=share_log, release=training.method, engine=engine)
    if steps is None and minutes is None:
        steps = training.steps
        minutes = DEFAULT_MINUTES if steps is None else None
    return TrainOptions.of(
        estimator_of(method, estimator, engine=engine),
        steps=steps,
        minutes=minutes,
        first_layer=(training.first_layer or 0) if first_layer is None else first_layer,
        memory=memory,
        **others,
    )


def choose_method(
    asked: Method | None, *, share_log: bool = False, release: Method | None = None, engine: str = AUTO
) -> Method:
    """Choose the method of a run. The first rule that applies decides:

    1. The user names a method, on the command line or in the policy.
    2. The user shares logs. Only zeroth order writes a log.
    3. The engine is ExecuTorch, which has no reverse pass.
    4. The installed release names a method.
    5. The default is the gradient.

    Example:
        >>> choose_method(None, share_log=True, release=Method.GRADIENT).value
        'zeroth-order'

    Args:
        asked: method that the user names.
        share_log: whether the user shares logs.
        release: method that the installed release names.
        engine: name of the engine.
    """
    if asked is not None:
        return asked
    if share_log or engine == EXECUTORCH:
        return Method.ZEROTH_ORDER
    return release or Method.GRADIENT


def estimator_of(method: Method, name: str | None = None, *, engine: str = AUTO) -> EstimatorKind:
    """Return the estimator that a user names, or the default of the method.

    Example:
        >>> estimator_of(Method.ZEROTH_ORDER, "one-sided").value
        'one_sided'

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
        # An ExecuTorch program computes both signs of a direction in one pass, so SPSA, which needs both, is
        # cheap.
        return EstimatorKind.SPSA if engine == EXECUTORCH else EstimatorKind.ONE_SIDED
    try:
        return _ESTIMATORS[name.replace("-", "_")]
    except KeyError:
        known = ", ".join(_ESTIMATORS).replace("_", "-")
        raise InputError(f"There is no estimator {name!r:.60}. Choose one of {known}.") from None
