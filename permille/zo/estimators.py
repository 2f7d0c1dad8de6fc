"""One step of zeroth-order descent: perturb, ask the engine for losses, round to integers (FORMAT 7).

`take_step` is pure and makes the record; `apply_record` is the one place where a record changes a state.
Estimators know nothing of models, engines nothing of optimizers.

Shapes: K = masked weights, V = variants of the values, Q = queries, B = sequences, T = tokens of a sequence.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.directions import direction, largest, sigma
from permille.zo.lattice import MAX_COEFFICIENT, STATE_LIMIT, coefficient, perturbed, values
from permille.zo.records import EstimatorKind, LogHeader, StepFlag, StepRecord
from permille.zo.schedule import learning_rate_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded sequences.

    Attributes:
        input_ids_BT: int64 token ids.
        attention_BT: bool, False at padding.
        target_BT: bool; `target[b, t]` counts the prediction OF token t from the tokens before it, so
            column 0 is False.
    """

    input_ids_BT: NDArray[np.int64]
    attention_BT: NDArray[np.bool_]
    target_BT: NDArray[np.bool_]


class LossEngine(Protocol):
    """The seam to the forward pass. A loss is the mean over all targets of the batch."""

    @property
    def k(self) -> int:
        """Number of masked weights."""
        ...

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Losses of v variants of the values on one batch, float32 [v]."""
        ...

    def directional_derivatives(
        self, values_K: NDArray[np.float32], directions_QK: NDArray[np.float32], batch: Batch
    ) -> tuple[float, NDArray[np.float64]]:
        """The loss `f` at `values_K`, and `grad f . direction` there for each direction, float64 [q]."""
        ...


def take_step(
    engine: LossEngine,
    batch: Batch,
    header: LogHeader,
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step: int,
    *,
    clip: float | None,
) -> StepRecord:
    """Estimate one step at state `s_K`, without changing it.

    Args:
        clip: bound on |projected_grad|, or None. What is clipped is flagged, and logged as applied.

    Returns:
        The record. A non-finite loss or scalar, or a coefficient beyond the format, gives zeros, REJECTED.
    """
    if header.estimator is EstimatorKind.SPSA:
        loss, projected_grad_Q = spsa(engine, batch, header, w_base_K, s_K, step)
    else:
        loss, projected_grad_Q = forward_mode(engine, batch, header, w_base_K, s_K, step)
    return _record(header, step, loss, projected_grad_Q, clip)


def spsa(
    engine: LossEngine,
    batch: Batch,
    header: LogHeader,
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step: int,
) -> tuple[float, NDArray[np.float64]]:
    """Two-sided finite differences along q directions, all 2q variants in one call of the engine.

    `projected_grad_i = (f(w + epsilon*z_i/sigma) - f(w - epsilon*z_i/sigma)) / (2*epsilon)` (Spall 1992;
    P-RGE's inner and outer loop). Variants are ordered +z_0, -z_0, +z_1, -z_1, ...

    Returns:
        Mean of the 2q losses, and the q scalars in float64.
    """
    scale = header.epsilon / sigma(header.distribution)
    values_VK = np.empty((2 * header.queries, header.k), dtype=np.float32)
    for query in range(header.queries):
        z_K = _direction(header, step, query)
        values_VK[2 * query] = perturbed(w_base_K, s_K, header.step_unit_exponent, z_K, scale)
        values_VK[2 * query + 1] = perturbed(w_base_K, s_K, header.step_unit_exponent, z_K, -scale)
    losses_V = _scalars(engine.losses(values_VK, batch), 2 * header.queries)
    with np.errstate(invalid="ignore", over="ignore"):
        projected_grad_Q = (losses_V[0::2] - losses_V[1::2]) / (2 * header.epsilon)
        return float(losses_V.mean()), projected_grad_Q


def forward_mode(
    engine: LossEngine,
    batch: Batch,
    header: LogHeader,
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step: int,
) -> tuple[float, NDArray[np.float64]]:
    """Exact directional derivatives `grad f . z_i / sigma`: no epsilon, and the same log.

    Returns:
        The loss at the state, and the q scalars in float64.
    """
    values_K = values(w_base_K, s_K, header.step_unit_exponent)
    directions_QK = np.empty((header.queries, header.k), dtype=np.float32)
    for query in range(header.queries):
        directions_QK[query] = _direction(header, step, query)
    directions_QK /= np.float32(sigma(header.distribution))
    loss, scalars_Q = engine.directional_derivatives(values_K, directions_QK, batch)
    return loss, _scalars(scalars_Q, header.queries)


def apply_record(s_K: NDArray[np.int64], record: StepRecord, header: LogHeader) -> None:
    """Move a state by one record, in place: `s += sum_i c_i * z_i`.

    Raises:
        InputError: the state would leave the exact range (FORMAT 7.3); it is then unchanged.
    """
    if len(s_K) != header.k or len(record.coefficients) != header.queries:
        raise InputError(
            f"expected a state of {header.k} and {header.queries} coefficients, "
            f"got {len(s_K)} and {len(record.coefficients)}"
        )
    reach = sum(abs(c) for c in record.coefficients) * largest(header.distribution)
    if reach and max(int(s_K.max()), -int(s_K.min())) + reach > STATE_LIMIT:
        raise InputError(f"expected a state within 2**53, got a step of {reach} that may leave it")
    for query, c in enumerate(record.coefficients):
        if c:
            s_K += c * _direction(header, record.step, query).astype(np.int64)


def _record(
    header: LogHeader, step: int, loss: float, projected_grad_Q: NDArray[np.float64], clip: float | None
) -> StepRecord:
    rejected = StepRecord(step=step, coefficients=(0,) * header.queries, loss=loss, flags=StepFlag.REJECTED)
    # Before any clipping: min(max(-100, nan), 100) is -100
    if not (math.isfinite(loss) and np.isfinite(projected_grad_Q).all()):
        return rejected
    flags = StepFlag.NONE
    if clip is not None:
        if np.abs(projected_grad_Q).max() > clip:
            flags = StepFlag.CLIPPED
        projected_grad_Q = np.clip(projected_grad_Q, -clip, clip)
    learning_rate = learning_rate_at(
        header.schedule, learning_rate=header.learning_rate, step=step, total_steps=header.total_steps
    )
    try:
        coefficients = tuple(
            coefficient(
                learning_rate=learning_rate,
                projected_grad=projected_grad,
                queries=header.queries,
                sigma=sigma(header.distribution),
                step_unit_exponent=header.step_unit_exponent,
            )
            for projected_grad in projected_grad_Q.tolist()
        )
    except InputError:  # the quotient overflowed
        return rejected
    if max(abs(c) for c in coefficients) > MAX_COEFFICIENT:
        return rejected
    return StepRecord(step=step, coefficients=coefficients, loss=loss, flags=flags)


def _direction(header: LogHeader, step: int, query: int) -> NDArray[np.int8]:
    return direction(
        seed=header.seed, step=step, query=query, counts=header.counts, distribution=header.distribution
    )


def _scalars(scalars: NDArray[np.floating], expected: int) -> NDArray[np.float64]:
    if scalars.shape != (expected,):
        raise InputError(f"expected {expected} scalars from the engine, got shape {scalars.shape}")
    return scalars.astype(np.float64)
