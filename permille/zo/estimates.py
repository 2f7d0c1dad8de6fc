"""The estimators: from a state and a batch to the loss and one projected gradient for each direction.

All directions are along `z / sigma` (unit variance), and a step moves by the mean over the directions of a
block of `projected_grad * z / sigma`. Its expectation is `M g`, g the gradient and M the covariance of the
directions (for plain ones the identity), up to terms of the order of epsilon squared (none for forward
mode). Costs, in forward passes of the batch, with q directions: SPSA 2 q, one-sided q, forward mode about q
+ 1 of somewhat dearer passes, split 2 P_1 of the lower block and 2 P_2 of the upper one where the engine
shares what variants have in common.

Shapes: K = masked weights, V = variants of the values, Q = queries, P = lower queries,
S = sign of the lower direction (2), J = upper directions for each lower one and sign, D = sign of the upper
direction (2).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.header import EstimatorKind, LogHeader
from permille.zo.lattice import perturbed, perturbed_pairs, values
from permille.zo.layers import NO_LAYERS, DirectionLayers
from permille.zo.loss_engine import Batch, LossEngine
from permille.zo.step_directions import directions_of

Estimate = Callable[
    [LossEngine, Batch, LogHeader, NDArray[np.float32], NDArray[np.int64], int, DirectionLayers],
    tuple[float, NDArray[np.float64]],
]


def estimate(
    engine: LossEngine,
    batch: Batch,
    header: LogHeader,
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step: int,
    layers: DirectionLayers = NO_LAYERS,
) -> tuple[float, NDArray[np.float64]]:
    """The loss of `step` and its q scalars, by the header's estimator; neither need be finite."""
    return _ESTIMATES[header.estimator](engine, batch, header, w_base_K, s_K, step, layers)


def spsa(
    engine: LossEngine,
    batch: Batch,
    header: LogHeader,
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step: int,
    layers: DirectionLayers = NO_LAYERS,
) -> tuple[float, NDArray[np.float64]]:
    """Two-sided finite differences along q directions, all 2q variants in one call of the engine.

    `projected_grad_i = (f(w + epsilon*z_i/sigma) - f(w - epsilon*z_i/sigma)) / (2*epsilon)` (Spall 1992;
    P-RGE's inner and outer loop). Variants are ordered +z_0, -z_0, +z_1, -z_1, ...

    Returns:
        Mean of the 2q losses, and the q scalars in float64.
    """
    z_QK = directions_of(header, step, layers)
    epsilon = header.epsilon_at(step)
    scale = epsilon / header.sigma_at(step)
    values_VK = perturbed_pairs(w_base_K, s_K, header.step_unit_exponent, z_QK, scale)
    losses_V = _scalars(engine.losses(values_VK, batch), 2 * header.queries)
    with np.errstate(invalid="ignore", over="ignore"):
        projected_grad_Q = (losses_V[0::2] - losses_V[1::2]) / (2 * epsilon)
        return float(losses_V.mean()), projected_grad_Q


def one_sided(
    engine: LossEngine,
    batch: Batch,
    header: LogHeader,
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step: int,
    layers: DirectionLayers = NO_LAYERS,
) -> tuple[float, NDArray[np.float64]]:
    """One-sided differences along q directions against the mean of their own losses, q forward passes.

    `projected_grad_i = (L_i - mean L) / epsilon * q / (q - 1)`, `L_i = f(w + epsilon*z_i/sigma)`. Like FZOO
    without its division by the losses' deviation, which biases the step. The mean takes out what all losses
    share, curvature included, which the loss at the state itself does not; so that loss is not computed. It
    holds the loss of the direction itself, hence `q / (q - 1)`: the difference to the mean of the others.

    Returns:
        Mean of the q losses, and the q scalars in float64.
    """
    z_QK = directions_of(header, step, layers)
    epsilon = header.epsilon_at(step)
    scale = epsilon / header.sigma_at(step)
    values_VK = np.empty((header.queries, header.k), dtype=np.float32)
    for query in range(header.queries):
        values_VK[query] = perturbed(w_base_K, s_K, header.step_unit_exponent, z_QK[query], scale)
    losses_V = _scalars(engine.losses(values_VK, batch), header.queries)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = losses_V.mean()
        unbiased = header.queries / (header.queries - 1)
        return float(mean), (losses_V - mean) * (unbiased / epsilon)


def split(
    engine: LossEngine,
    batch: Batch,
    header: LogHeader,
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step: int,
    layers: DirectionLayers = NO_LAYERS,
) -> tuple[float, NDArray[np.float64]]:
    """Two blocks: each of the P_1 lower directions and its negative carry J = P_2 / (2 P_1) upper pairs.

    FedSPZO, equations 6 and 8, one scalar for each direction. Of upper direction j, at its sign of its lower
    direction: `(f(.., +z_j) - f(.., -z_j)) / (2*epsilon)`; of a lower direction
    `(mean of its losses at + less mean of its losses at -) / (2*epsilon)`: equation 7's double sum collapses
    to that. All 2 P_2 variants go to the engine in one call, in groups that agree in the lower block.

    Returns:
        Mean of the 2 P_2 losses, and the P_1 + P_2 scalars in float64, the lower block's first.
    """
    if header.split is None:
        raise InputError("expected a header with two blocks, got one without")
    lower = header.split.lower_queries
    upper = header.queries - lower
    shape_PSJD = (lower, 2, upper // (2 * lower), 2)
    z_QK = directions_of(header, step, layers)
    epsilon = header.epsilon_at(step)
    scale = epsilon / header.sigma_at(step)
    values_VK = np.empty((2 * upper, header.k), dtype=np.float32)
    for variant in range(2 * upper):
        p, minus, _, opposite = np.unravel_index(variant, shape_PSJD)
        z_lower_K = z_QK[p] * z_QK.dtype.type(1 - 2 * minus)
        z_upper_K = z_QK[lower + variant // 2] * z_QK.dtype.type(1 - 2 * opposite)
        # The blocks do not overlap: each element of the sum is one of the two
        values_VK[variant] = perturbed(w_base_K, s_K, header.step_unit_exponent, z_lower_K + z_upper_K, scale)
    losses_V = _scalars(engine.losses(values_VK, batch), 2 * upper)
    losses_PSJD = losses_V.reshape(shape_PSJD)
    with np.errstate(invalid="ignore", over="ignore"):
        means_PS = losses_PSJD.mean(axis=(2, 3))
        lower_Q = (means_PS[:, 0] - means_PS[:, 1]) / (2 * epsilon)
        upper_Q = (losses_V[0::2] - losses_V[1::2]) / (2 * epsilon)
        return float(losses_V.mean()), np.concatenate([lower_Q, upper_Q])


def forward_mode(
    engine: LossEngine,
    batch: Batch,
    header: LogHeader,
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step: int,
    layers: DirectionLayers = NO_LAYERS,
) -> tuple[float, NDArray[np.float64]]:
    """Exact directional derivatives `grad f . z_i / sigma`: no epsilon, and the same log.

    Returns:
        The loss at the state, and the q scalars in float64.
    """
    values_K = values(w_base_K, s_K, header.step_unit_exponent)
    directions_QK = directions_of(header, step, layers).astype(np.float32)
    directions_QK /= np.float32(header.sigma_at(step))
    loss, scalars_Q = engine.directional_derivatives(values_K, directions_QK, batch)
    return loss, _scalars(scalars_Q, header.queries)


_ESTIMATES: dict[EstimatorKind, Estimate] = {
    EstimatorKind.SPSA: spsa,
    EstimatorKind.FORWARD: forward_mode,
    EstimatorKind.ONE_SIDED: one_sided,
    EstimatorKind.SPLIT: split,
}


def _scalars(scalars: NDArray[np.floating], expected: int) -> NDArray[np.float64]:
    if scalars.shape != (expected,):
        raise InputError(f"expected {expected} scalars from the engine, got shape {scalars.shape}")
    return scalars.astype(np.float64)
