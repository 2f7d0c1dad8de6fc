"""Headers and records for the tests of logs, and a quadratic that stands in for a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from permille.zo.estimators import Batch
from permille.zo.layers import Basis, DirectionLayers
from permille.zo.exponents import Exponents
from permille.zo.header import BlockSplit, EstimatorKind, LogHeader, Schedule
from permille.zo.directions import Distribution
from permille.zo.records import StepFlag, StepRecord


def make_header(**changes: Any) -> LogHeader:
    """A small valid header with some fields changed."""
    fields: dict[str, Any] = {
        "package_digest": "sha256:" + "a" * 64,
        "mask_digest": "sha256:" + "b" * 64,
        "seed": 0x0123456789ABCDEF,
        "distribution": Distribution.RADEMACHER,
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


def kind_fields(estimator: EstimatorKind, *, lower: int = 1, upper: int = 2) -> dict[str, Any]:
    """What a header of this estimator needs: a split has its blocks between the first and the last tensor."""
    if estimator is EstimatorKind.SPLIT:
        split = BlockSplit(first_upper_tensor=2, lower_queries=lower)
        return {"estimator": estimator, "queries": lower + upper, "split": split}
    return {"estimator": estimator}


def make_layers(k: int, *, rank: int = 5, largest: int = 3, seed: int = 0) -> DirectionLayers:
    """A basis and exponents of k weights, full of extremes."""
    rng = np.random.default_rng(seed)
    u_KR = rng.integers(-127, 128, (k, rank)).astype(np.int8)
    e_K = rng.integers(0, largest + 1, k).astype(np.int8)
    e_K[:2] = 0, largest
    return DirectionLayers(
        basis=Basis(u_KR, "sha256:" + "c" * 64), exponents=Exponents(e_K, "sha256:" + "d" * 64)
    )


def layered_fields(layers: DirectionLayers, *, basis_steps: int = 3, **rates: float) -> dict[str, Any]:
    """What a header says that uses both layers."""
    assert layers.basis is not None
    assert layers.exponents is not None
    rates = {"epsilon": 1e-3, "learning_rate": 0.1} | rates
    return {
        "basis": layers.basis.use(steps=basis_steps, **rates),
        "exponents": layers.exponents.use(),
    }


def make_records(rows: Sequence[Sequence[int]], *, loss: float = 1.5) -> list[StepRecord]:
    """Records of steps 0, 1, ... with the given coefficients."""
    return [StepRecord(step=step, coefficients=tuple(row), loss=loss) for step, row in enumerate(rows)]


def random_rows(steps: int, queries: int = 2, *, size: int = 1024, seed: int = 0) -> list[list[int]]:
    """Coefficients of a realistic size: normal, with the given root mean square."""
    rows: list[list[int]] = (
        np.rint(np.random.default_rng(seed).normal(0, size, (steps, queries))).astype(int).tolist()
    )
    return rows


def records_strategy(*, queries: int, max_steps: int) -> st.SearchStrategy[list[StepRecord]]:
    """Any records that FORMAT 8.2 allows, rejected and clipped ones, infinite and NaN losses included."""
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


def same_records(left: Sequence[StepRecord], right: Sequence[StepRecord]) -> bool:
    """Equality that holds for NaN losses too."""
    return [repr(record) for record in left] == [repr(record) for record in right]


BATCH = Batch(
    input_ids_BT=np.zeros((1, 2), dtype=np.int64),
    attention_BT=np.ones((1, 2), dtype=np.bool_),
    target_BT=np.array([[False, True]]),
)


class QuadraticEngine:
    """`f(w) = 0.5 * sum(curvature * (w - target)**2)`: a model whose derivatives are known in closed form."""

    def __init__(self, target_K: NDArray[np.float32], curvature_K: NDArray[np.float32]) -> None:
        self.target_K = target_K.astype(np.float64)
        self.curvature_K = curvature_K.astype(np.float64)
        self.calls: list[int] = []

    @property
    def k(self) -> int:
        return len(self.target_K)

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        self.calls.append(len(values_VK))
        away_VK = values_VK.astype(np.float64) - self.target_K
        losses: NDArray[np.float32] = (0.5 * (self.curvature_K * away_VK**2).sum(axis=1)).astype(np.float32)
        return losses

    def directional_derivatives(
        self, values_K: NDArray[np.float32], directions_QK: NDArray[np.float32], batch: Batch
    ) -> tuple[float, NDArray[np.float64]]:
        gradient_K = self.curvature_K * (values_K.astype(np.float64) - self.target_K)
        derivatives: NDArray[np.float64] = directions_QK.astype(np.float64) @ gradient_K
        return float(self.losses(values_K[None], batch)[0]), derivatives
