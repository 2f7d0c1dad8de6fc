"""How far an engine's estimates of directional derivatives are from the exact ones, and why. numpy only.

    g_i = (f(w + epsilon z_i) - f(w - epsilon z_i)) / (2 epsilon)        (MeZO, definition 1)
    error = rms_i(g_i - grad f . z_i) / rms_i(grad f . z_i)

The exact derivative is forward-mode in float32. At a small epsilon the error is what rounding leaves of a
difference of two losses; at a large one, curvature. An error of 1 is a step that knows nothing.

# Legend: K masked weights, Q directions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.weights import bf16_of, widen_bf16
from permille.zo.estimators import Batch, LossEngine

# Fewer directions tell too little: the error of an rms over 32 is some 12%.
MIN_DIRECTIONS = 32
# Directions of one call to an engine, and perturbed values of one: bound what those take.
_TOGETHER = 4
_TOGETHER_VALUES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What was measured of one engine on one batch.

    Attributes:
        epsilon: of the differences; None for the engine's own forward-mode derivatives.
        relative_error: as the module defines it.
        cosine: between the perturbation that the handed float32 values carry and the intended one.
        bfloat16_cosine: the same if values were rounded to bfloat16 and nothing made up for it.
    """

    epsilon: float | None
    directions: int
    relative_error: float
    cosine: float
    bfloat16_cosine: float


def _untold(_done: int) -> None:
    """Progress that nobody follows."""


def rademacher(queries: int, k: int, seed: int) -> NDArray[np.float32]:
    """Directions of +1 and -1, [q, k], for measurements alone; training's are of `permille.zo.directions`."""
    rng = np.random.Generator(np.random.Philox(seed))
    return rng.choice(np.array([-1, 1], np.float32), (queries, k))


def measure_differences(
    engine: LossEngine,
    exact_Q: NDArray[np.float64],
    values_K: NDArray[np.float32],
    directions_QK: NDArray[np.float32],
    batch: Batch,
    epsilon: float,
    progress: Callable[[int], None] = _untold,
) -> Precision:
    """The error of two-sided differences.

    Args:
        exact_Q: what a float32 engine's `directional_derivatives` gives for these directions.
        directions_QK: may be a mapped file; few rows are looked at together.
        progress: told how many directions are done.

    Raises:
        InputError: fewer than 32 directions, an epsilon that is not positive, or exact derivatives that are
            all zero or not finite.
    """
    _check(exact_Q, directions_QK)
    if not 0 < epsilon < np.inf:
        raise InputError(f"expected a positive epsilon, got {epsilon}")
    parts = []
    for together in directions_together(directions_QK):
        parts.append(differences(engine, values_K, directions_QK[together], batch, epsilon))
        progress(together.stop)
    cosines = [perturbation_cosines(values_K, z_K, epsilon) for z_K in directions_QK]
    return Precision(
        epsilon=epsilon,
        directions=len(directions_QK),
        relative_error=relative_error(np.concatenate(parts), exact_Q),
        cosine=float(np.mean([cosine for cosine, _ in cosines])),
        bfloat16_cosine=float(np.mean([cosine for _, cosine in cosines])),
    )


def measure_forward_mode(
    engine: LossEngine,
    exact_Q: NDArray[np.float64],
    values_K: NDArray[np.float32],
    directions_QK: NDArray[np.float32],
    batch: Batch,
) -> Precision:
    """The error of the engine's own forward-mode derivatives; they perturb nothing, so their cosines are 1.

    Raises:
        InputError: as `measure_differences`.
    """
    _check(exact_Q, directions_QK)
    parts = [
        engine.directional_derivatives(values_K, directions_QK[together], batch)[1]
        for together in directions_together(directions_QK)
    ]
    return Precision(
        epsilon=None,
        directions=len(directions_QK),
        relative_error=relative_error(np.concatenate(parts), exact_Q),
        cosine=1.0,
        bfloat16_cosine=1.0,
    )


def directions_together(directions_QK: NDArray[np.float32]) -> Iterator[slice]:
    """Rows for one call to an engine each."""
    queries, k = directions_QK.shape
    size = max(1, min(_TOGETHER, _TOGETHER_VALUES // max(k, 1)))
    return (slice(start, min(start + size, queries)) for start in range(0, queries, size))


def differences(
    engine: LossEngine,
    values_K: NDArray[np.float32],
    directions_QK: NDArray[np.float32],
    batch: Batch,
    epsilon: float,
) -> NDArray[np.float64]:
    """Two-sided differences along each direction, [q], both signs in one call."""
    count = len(directions_QK)
    shift_QK = epsilon * directions_QK.astype(np.float64)
    values_VK = np.concatenate([values_K + shift_QK, values_K - shift_QK]).astype(np.float32)
    losses_V = engine.losses(values_VK, batch).astype(np.float64)
    g_Q: NDArray[np.float64] = (losses_V[:count] - losses_V[count:]) / (2 * epsilon)
    return g_Q


def relative_error(got_Q: NDArray[np.float64], exact_Q: NDArray[np.float64]) -> float:
    """`rms(got - exact) / rms(exact)`; not finite where an estimate was not."""
    return float(np.linalg.norm(got_Q - exact_Q) / np.linalg.norm(exact_Q))


def perturbation_cosines(
    values_K: NDArray[np.float32], z_K: NDArray[np.float32], epsilon: float
) -> tuple[float, float]:
    """Cosine with z of half the difference of the perturbed values, as float32 and if rounded to bfloat16.

    0 where nothing of the perturbation is left.
    """
    shift_K = epsilon * z_K.astype(np.float64)
    plus_K, minus_K = (values_K + shift_K).astype(np.float32), (values_K - shift_K).astype(np.float32)
    kept_K = plus_K.astype(np.float64) - minus_K
    coarse_K = _through_bfloat16(plus_K).astype(np.float64) - _through_bfloat16(minus_K)
    return _cosine(kept_K, z_K), _cosine(coarse_K, z_K)


def _through_bfloat16(values_K: NDArray[np.float32]) -> NDArray[np.float32]:
    rounded_K = np.empty_like(values_K)
    widen_bf16(bf16_of(values_K), rounded_K)
    return rounded_K


def _cosine(left_K: NDArray[np.float64], right_K: NDArray[np.float32]) -> float:
    norms = float(np.linalg.norm(left_K)) * float(np.linalg.norm(right_K))
    return float(left_K @ right_K) / norms if norms else 0.0


def _check(exact_Q: NDArray[np.float64], directions_QK: NDArray[np.float32]) -> None:
    if len(directions_QK) < MIN_DIRECTIONS or exact_Q.shape != (len(directions_QK),):
        raise InputError(
            f"expected at least {MIN_DIRECTIONS} directions and as many exact derivatives, "
            f"got {len(directions_QK)} and {exact_Q.shape}"
        )
    if not np.isfinite(exact_Q).all() or not exact_Q.any():
        raise InputError("expected exact derivatives that are finite and not all zero, got others")
