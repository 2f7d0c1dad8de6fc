"""Headers and records for tests of logs, and a quadratic function in place of a model."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.zo.estimators import Batch
from permille.zo.header import BlockSplit, DirectionKind, LogHeader, Schedule
from permille.zo.records import StepFlag, StepRecord

DIGEST = "sha256:" + "d" * 64
ESTIMATES = [kind for kind in EstimatorKind if kind is not EstimatorKind.GRADIENT]
"""The estimators that ask an engine for losses or derivatives."""


def make_header(**changes: Any) -> LogHeader:
    """Return a small valid header with `changes`."""
    fields: dict[str, Any] = {
        "package_digest": "sha256:" + "a" * 64,
        "mask_digest": "sha256:" + "b" * 64,
        "seed": 0x0123456789ABCDEF,
        "estimator": EstimatorKind.SPSA,
        "queries": 2,
        "epsilon": 1e-3,
        "learning_rate": 0.1,
        "schedule": Schedule.CONSTANT,
        "total_steps": 5000,
        "step_unit_exponent": -20,
        "counts": (130, 0, 17),
    }
    return LogHeader(**(fields | changes))


def fields_of(header: LogHeader) -> dict[str, Any]:
    """Return the header in the form that the reference takes."""
    fields: dict[str, Any] = json.loads(header.to_bytes())
    return fields


def kind_fields(estimator: EstimatorKind, *, lower: int = 1, upper: int = 2) -> dict[str, Any]:
    """Return the fields that a header of this estimator needs.

    A split has its blocks between the first and the last tensor.
    """
    if estimator is EstimatorKind.SPLIT:
        split = BlockSplit(first_upper_tensor=2, lower_queries=lower)
        return {"estimator": estimator, "queries": lower + upper, "split": split}
    if estimator is EstimatorKind.GRADIENT:
        return {"estimator": estimator, "directions": DirectionKind.GROUPS}
    return {"estimator": estimator}


def header_kinds(counts: tuple[int, ...]) -> list[LogHeader]:
    """Return headers of three queries: one block, two blocks, groups, and a part of the tensors."""
    groups = {"estimator": EstimatorKind.ONE_SIDED, "directions": DirectionKind.GROUPS}
    parts = [make_header(counts=counts, queries=3, first_tensor=2, **kind) for kind in ({}, groups)]
    return parts + [
        make_header(counts=counts, **{"queries": 3} | kind_fields(kind))
        for kind in (EstimatorKind.SPSA, EstimatorKind.SPLIT, EstimatorKind.GRADIENT)
    ]


def make_records(rows: Sequence[Sequence[int]]) -> list[StepRecord]:
    """Return records of steps 0, 1, ... with these coefficients."""
    return [StepRecord(step=step, coefficients=tuple(row), loss=1.5) for step, row in enumerate(rows)]


def random_rows(steps: int, queries: int = 2, *, seed: int = 0) -> list[list[int]]:
    """Return coefficients of a realistic size: normal, with a root mean square of 1024."""
    rows: list[list[int]] = (
        np.rint(np.random.default_rng(seed).normal(0, 1024, (steps, queries))).astype(int).tolist()
    )
    return rows


def records_strategy(*, queries: int, max_steps: int) -> st.SearchStrategy[list[StepRecord]]:
    """Return a strategy for all records that FORMAT 8.2 allows.

    It includes rejected and clipped records, and losses that are infinite or NaN.
    """
    limit = 2**31 - 1
    taken = st.tuples(
        st.lists(st.integers(-limit, limit), min_size=queries, max_size=queries),
        st.sampled_from([StepFlag.NONE, StepFlag.CLIPPED]),
    )
    rejected = st.tuples(
        st.just([0] * queries), st.sampled_from([StepFlag.REJECTED, StepFlag.REJECTED | StepFlag.CLIPPED])
    )
    losses = st.floats(allow_nan=True, allow_infinity=True)
    return st.lists(st.tuples(st.one_of(taken, rejected), losses), max_size=max_steps).map(
        lambda steps: [
            StepRecord(step=step, coefficients=tuple(coefficients), loss=loss, flags=flags)
            for step, ((coefficients, flags), loss) in enumerate(steps)
        ]
    )


def flipped(data: bytes, position: int) -> bytes:
    """Return the same bytes with one bit flipped."""
    return data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]


def same_records(left: Sequence[StepRecord], right: Sequence[StepRecord]) -> bool:
    """Compare records. NaN losses are equal to each other."""
    return [repr(record) for record in left] == [repr(record) for record in right]


BATCH = Batch(
    input_ids_BT=np.zeros((1, 2), dtype=np.int64),
    attention_BT=np.ones((1, 2), dtype=np.bool_),
    target_BT=np.array([[False, True]]),
)


class QuadraticEngine:
    """`f(w) = 0.5 * sum(curvature * (w - target)**2)`: an engine with known derivatives."""

    def __init__(self, target_K: NDArray[np.float32], curvature_K: NDArray[np.float32]) -> None:
        self.target_K = target_K.astype(np.float64)
        self.curvature_K = curvature_K.astype(np.float64)
        self.asked_VK = np.empty((0, len(target_K)), dtype=np.float32)

    @property
    def k(self) -> int:
        return len(self.target_K)

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        self.asked_VK = values_VK.copy()
        away_VK = values_VK.astype(np.float64) - self.target_K
        losses: NDArray[np.float32] = (0.5 * (self.curvature_K * away_VK**2).sum(axis=1)).astype(np.float32)
        return losses

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        gradient_K = self.curvature_K * (values_K.astype(np.float64) - self.target_K)
        return float(self.losses(values_K[None], batch)[0]), gradient_K.astype(np.float32)


class FixedEngine(QuadraticEngine):
    """An engine that returns the same numbers for all inputs."""

    def __init__(self, losses: Sequence[float], slope: float = 0.0, k: int = 147) -> None:
        super().__init__(np.zeros(k, dtype=np.float32), np.zeros(k, dtype=np.float32))
        self._losses = losses
        self._slope = slope

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        return np.array(self._losses, dtype=np.float32)

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        return float(np.mean(self._losses)), np.full(self.k, self._slope, dtype=np.float32)
