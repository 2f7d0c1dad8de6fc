"""Estimators: the loss and one projected gradient for each direction of a step, from a state and a batch.

The elements of a direction z are -1, 0 and 1. Divided by sigma, the root mean square of z, they have unit
variance. A projected gradient is the derivative of the loss along `z / sigma`, or an estimate of it.

A block is a range of tensors with directions of its own. `split` has two blocks, and all other estimators
have one. For each block, a step averages `projected_grad * z / sigma` over the directions of the block. It
moves the weights by minus the learning rate times that average. The expectation of the average is the
gradient, up to terms of the order of epsilon squared (none for exact derivatives).

The cost of a step, in forward passes of the batch, with q directions:

- SPSA: 2 q.
- One-sided: q.
- Exact derivatives (`forward`): about 3, for any q.
- Split, with P_1 directions of the lower block and P_2 of the upper one: 2 P_1 passes through the layers of
  the lower block, and 2 P_2 passes through the others.

A variant is one set of values whose loss a step needs. Variants that agree in the lower layers can share the
passes through these layers. The light and the torch engine do so (`permille.engines.variants`). An exported
program does not, so it makes 2 P_2 whole passes for a split step. The property `layer_passes` of an engine
counts passes of one sequence through one decoder layer.

An estimator does not know the model, and an engine does not know the optimizer. `LossEngine` is the interface
between them.

Shapes: K = masked weights, V = variants of the values, Q = queries, B = sequences, T = tokens of a sequence,
P = lower queries, S = sign of the lower direction (2), J = upper directions for each sign of each lower
direction, D = sign of the upper direction (2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.errors import InputError
from permille.package.basis import Basis, required
from permille.package.limits import MAX_COLUMNS
from permille.zo.directions import direction
from permille.zo.groups import grouping
from permille.zo.header import DirectionKind, LogHeader
from permille.zo.lattice import perturbed, perturbed_pairs, values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SoftTargets:
    """Distributions of another model at the targets of a batch, coarsened to n + 1 classes.

    A row has n tokens with their probabilities. The rest of the probability belongs to all other tokens
    together. The loss of a token is then the divergence `sum_i p_i log(p_i / q_i)` over these n + 1 classes,
    where q are the probabilities of the trained model. The loss is 0 if p and q are equal.

    Attributes:
        ids_RN: int64 [R, n], one row for each target of the batch, row-major. The ids in a row are distinct.
        probability_RN: float32 [R, n], from 0 to 1. The sum of a row is at most 1, up to rounding.
    """

    ids_RN: NDArray[np.int64]
    probability_RN: NDArray[np.float32]

    def rows(self, part: slice) -> "SoftTargets":
        """Return the distributions of some of the targets."""
        return SoftTargets(ids_RN=self.ids_RN[part], probability_RN=self.probability_RN[part])

    def repeated(self, times: int) -> "SoftTargets":
        """Return the distributions of all targets, repeated `times` times."""
        return SoftTargets(
            ids_RN=np.tile(self.ids_RN, (times, 1)), probability_RN=np.tile(self.probability_RN, (times, 1))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded sequences.

    Attributes:
        input_ids_BT: int64 token ids.
        attention_BT: bool, False at padding.
        target_BT: bool. True if the loss includes the prediction of token t from the tokens before it.
            Column 0 is False.
        soft: the distributions to predict at the targets, or None to predict the tokens.
    """

    input_ids_BT: NDArray[np.int64]
    attention_BT: NDArray[np.bool_]
    target_BT: NDArray[np.bool_]
    soft: SoftTargets | None = None


class LossEngine(Protocol):
    """An engine that computes losses. A loss is the mean over all targets of the batch."""

    @property
    def k(self) -> int:
        """Number of trained values: the masked weights, or the numbers of an adapter."""

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the mean loss over the batch's target tokens, one for each variant of the trained values.

        Args:
            values_VK: float32 [V, K], V >= 1.
            batch: a right-padded batch.

        Returns:
            float32 [V]. A loss is NaN or infinite if its forward pass overflowed.

        Raises:
            InputError: a shape, dtype or token id does not fit the package, or there is no target.
        """


class Differentiable(Protocol):
    """An engine's reverse pass."""

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        """Return the mean loss over the batch's target tokens, and its gradient.

        Args:
            values_K: the trained values, float32 [K].
            batch: a right-padded batch.

        Returns:
            The loss, and `d loss / d values`, float32 [K]. They are NaN or infinite if the pass overflowed.

        Raises:
            InputError: as for `LossEngine.losses`.
        """


def differentiable(engine: LossEngine) -> Differentiable:
    """Return the engine, if it has a reverse pass.

    Raises:
        InputError: the engine only computes losses.
    """
    if not hasattr(engine, "gradient"):
        raise InputError(
            "This engine computes no gradients. Choose the engine light or torch, or the method zeroth-order "
            "with the estimator one-sided, which needs only forward passes."
        )
    return cast("Differentiable", engine)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Descent:
    """Settings that are the same at every step of a log.

    Attributes:
        header: the header of the log.
        w_base_K: the values of the masked weights at state zero.
        basis: the basis of the package, for a log with `basis_steps`.
    """

    header: LogHeader
    w_base_K: NDArray[np.float32]
    basis: Basis | None = None

    @property
    def scale(self) -> float:
        """Return the factor of z in a perturbation: `epsilon / sigma`."""
        return self.header.epsilon / self.header.sigma

    def perturbed(self, s_K: NDArray[np.int64], z_K: NDArray[np.int8]) -> NDArray[np.float32]:
        """Return the values of a state moved along one direction, float32 [K]."""
        return perturbed(self.w_base_K, s_K, self.header.step_unit_exponent, z_K, self.scale)


Estimate = Callable[
    [LossEngine, Batch, Descent, NDArray[np.int64], NDArray[np.int8]], tuple[float, NDArray[np.float64]]
]


def directions_of(header: LogHeader, step: int) -> NDArray[np.int8]:
    """Return all directions of a step, [Q, K], with elements -1, 0 and 1.

    Divided by `header.sigma` they have unit variance. A direction of one block is 0 outside that block
    (FORMAT 6.3, 6.5 and 6.6).
    """
    z_QK = np.zeros((header.queries, header.k), dtype=np.int8)
    if header.directions is DirectionKind.GROUPS:
        found = grouping(header, step)
        z_QK[found.group_K, np.arange(header.k)] = found.sign_K
    else:
        for query in range(header.queries):
            z_QK[query] = direction(seed=header.seed, step=step, query=query, counts=header.counts)
    for queries, tensors in header.blocks():
        weights = header.weights_of(tensors)
        z_QK[queries, : weights.start] = 0
        z_QK[queries, weights.stop :] = 0
    return z_QK


def estimate(
    engine: LossEngine, batch: Batch, descent: Descent, s_K: NDArray[np.int64], step: int
) -> tuple[float, NDArray[np.float64]]:
    """Return the loss of `step` and its q projected gradients. Any of them may be NaN or infinite."""
    if step < descent.header.basis_steps:
        return _along_columns(engine, batch, descent, s_K, step)
    # `EstimatorKind.GRADIENT` has no entry: `steps.change_step` makes its records from a known change.
    found = _ESTIMATES.get(descent.header.estimator)
    if found is None:
        raise InputError(
            f"expected an estimator of losses or derivatives, got {descent.header.estimator.value}"
        )
    z_QK = directions_of(descent.header, step)
    return found(engine, batch, descent, s_K, z_QK)


def _along_columns(
    engine: LossEngine, batch: Batch, descent: Descent, s_K: NDArray[np.int64], step: int
) -> tuple[float, NDArray[np.float64]]:
    """Compare the losses along the columns of the basis with their own mean, as `_one_sided` does.

    The signs of the columns are a row of a Hadamard matrix, another one at each step. The comparison cannot
    see the slope along the sum of the signed columns. With new signs, this sum is another vector.

    Returns:
        Mean of the losses, and q derivatives along the columns, divided by the columns' norm. If there are
        fewer columns than q, the last ones are 0.
    """
    basis, queries = required(descent.basis), descent.header.queries
    columns = min(queries, len(basis.columns_RK))
    row = step % (MAX_COLUMNS - 1) + 1  # row 0 would turn no column round
    sign_Q = np.array([1 - 2 * ((column & row).bit_count() % 2) for column in range(columns)])
    scale = basis.reach / basis.norm
    exponent = descent.header.step_unit_exponent
    values_VK = np.empty((columns, descent.header.k), dtype=np.float32)
    for column, sign in enumerate(sign_Q.tolist()):
        values_VK[column] = perturbed(descent.w_base_K, s_K, exponent, basis.columns_RK[column], sign * scale)
    losses_V = _checked(engine.losses(values_VK, batch), columns)
    slope_Q = np.zeros(queries)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = losses_V.mean()
        slope_Q[:columns] = sign_Q * (losses_V - mean) * (columns / (columns - 1) / basis.reach)
    return float(mean), slope_Q


def _spsa(
    engine: LossEngine, batch: Batch, descent: Descent, s_K: NDArray[np.int64], z_QK: NDArray[np.int8]
) -> tuple[float, NDArray[np.float64]]:
    """Compute two-sided finite differences along q directions, with one engine call for all 2q variants.

    `projected_grad_i = (f(w + epsilon*z_i/sigma) - f(w - epsilon*z_i/sigma)) / (2*epsilon)` (Spall 1992).
    As in P-RGE, the order of the variants is +z_0, -z_0, +z_1, -z_1, ...

    Returns:
        Mean of the 2q losses, and the q projected gradients in float64.
    """
    header = descent.header
    # Compute each variant from the state. Adding and subtracting in place, as MeZO does, would accumulate
    # rounding errors.
    values_VK = perturbed_pairs(descent.w_base_K, s_K, header.step_unit_exponent, z_QK, descent.scale)
    losses_V = _checked(engine.losses(values_VK, batch), 2 * header.queries)
    with np.errstate(invalid="ignore", over="ignore"):
        # NaN and infinity pass through here. `rounded_step` turns them into a rejected record.
        projected_grad_Q = (losses_V[0::2] - losses_V[1::2]) / (2 * header.epsilon)
        return float(losses_V.mean()), projected_grad_Q


def _one_sided(
    engine: LossEngine, batch: Batch, descent: Descent, s_K: NDArray[np.int64], z_QK: NDArray[np.int8]
) -> tuple[float, NDArray[np.float64]]:
    """Compare the losses along q directions with their own mean: one-sided differences, q forward passes.

    `projected_grad_i = (L_i - mean L) / epsilon * q / (q - 1)`, `L_i = f(w + epsilon*z_i/sigma)`. This is
    FZOO without its division by the standard deviation of the losses, which would bias the step. Subtracting
    the mean removes what the losses have in common, including curvature. Subtracting the loss at the state
    would leave the curvature in, so that loss is not computed. The mean includes `L_i` itself. The factor
    `q / (q - 1)` turns the result into the difference from the mean of the other losses.

    Returns:
        Mean of the q losses, and the q projected gradients in float64.
    """
    queries = len(z_QK)
    # Fill one array: a list of variants beside it would double the memory of a step.
    values_VK = np.empty((queries, descent.header.k), dtype=np.float32)
    for query, z_K in enumerate(z_QK):
        values_VK[query] = descent.perturbed(s_K, z_K)
    losses_V = _checked(engine.losses(values_VK, batch), queries)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = losses_V.mean()
        # The header guarantees at least two queries for this estimator.
        unbiased = queries / (queries - 1)
        return float(mean), (losses_V - mean) * (unbiased / descent.header.epsilon)


def _split(
    engine: LossEngine, batch: Batch, descent: Descent, s_K: NDArray[np.int64], z_QK: NDArray[np.int8]
) -> tuple[float, NDArray[np.float64]]:
    """Estimate two blocks together.

    Each lower direction is used with both signs, which makes 2 P_1 cases. Each case has J = P_2 / (2 P_1)
    upper directions of its own. Each upper direction is used with both signs, too.

    The estimate follows equations 6 and 8 of FedSPZO, with one projected gradient per direction:

    - Upper direction: the difference of its two losses, divided by `2*epsilon`. Both losses have the same
      lower direction with the same sign.
    - Lower direction: the mean of its losses with the sign +, minus the mean of its losses with the sign -,
      divided by `2*epsilon`. The double sum of equation 7 reduces to this.

    All 2 P_2 variants go to the engine in one call. Variants with the same lower block are neighbours.

    Returns:
        Mean of the 2 P_2 losses, and the P_1 + P_2 projected gradients in float64, the lower block's first.
    """
    (lower_queries, _), (upper_queries, _) = descent.header.blocks()
    lower, upper = lower_queries.stop, upper_queries.stop - upper_queries.start
    shape_PSJD = (lower, 2, upper // (2 * lower), 2)
    values_VK = np.empty((2 * upper, descent.header.k), dtype=np.float32)
    # Variants of one lower direction and sign are neighbours, so an engine can compute the lower block once
    # for all of them.
    for variant in range(2 * upper):
        p, minus, _, opposite = np.unravel_index(variant, shape_PSJD)
        z_lower_K = z_QK[p] * z_QK.dtype.type(1 - 2 * minus)
        z_upper_K = z_QK[lower + variant // 2] * z_QK.dtype.type(1 - 2 * opposite)
        # The blocks do not overlap, so each element of the sum comes from one of the two directions.
        values_VK[variant] = descent.perturbed(s_K, z_lower_K + z_upper_K)
    losses_V = _checked(engine.losses(values_VK, batch), 2 * upper)
    losses_PSJD = losses_V.reshape(shape_PSJD)
    epsilon = descent.header.epsilon
    with np.errstate(invalid="ignore", over="ignore"):
        means_PS = losses_PSJD.mean(axis=(2, 3))
        lower_Q = (means_PS[:, 0] - means_PS[:, 1]) / (2 * epsilon)
        upper_Q = (losses_V[0::2] - losses_V[1::2]) / (2 * epsilon)
        return float(losses_V.mean()), np.concatenate([lower_Q, upper_Q])


def _forward(
    engine: LossEngine, batch: Batch, descent: Descent, s_K: NDArray[np.int64], z_QK: NDArray[np.int8]
) -> tuple[float, NDArray[np.float64]]:
    """Compute the exact directional derivatives `grad f . z_i / sigma`. They need no epsilon.

    One reverse pass gives all derivatives. The format calls this estimator `forward`, after forward-mode
    differentiation, which gives the same numbers with one pass for each direction.

    Returns:
        The loss at the state, and the q projected gradients in float64.
    """
    header = descent.header
    values_K = values(descent.w_base_K, s_K, header.step_unit_exponent)
    loss, gradient_K = differentiable(engine).gradient(values_K, batch)
    # Compute in float64, so that the order of the sum hardly matters for the rounded coefficient.
    wide_K = gradient_K.astype(np.float64) / header.sigma
    # Convert one direction at a time, because all directions in float64 would take gigabytes.
    return loss, np.array([z_K @ wide_K for z_K in z_QK])


_ESTIMATES: dict[EstimatorKind, Estimate] = {
    EstimatorKind.SPSA: _spsa,
    EstimatorKind.FORWARD: _forward,
    EstimatorKind.ONE_SIDED: _one_sided,
    EstimatorKind.SPLIT: _split,
}


def _checked(losses: NDArray[np.floating], expected: int) -> NDArray[np.float64]:
    if losses.shape != (expected,):
        raise InputError(f"expected {expected} losses from the engine, got shape {losses.shape}")
    # The losses may differ by a few units in the last place of float32, so subtract them in float64.
    return losses.astype(np.float64)
