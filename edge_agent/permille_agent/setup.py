"""What every phase of a run works with, and the headers of its logs.

A run goes through one or two phases of directions: learned ones, where the package has a basis and the run
uses it, then plain ones. Each has its own epsilon and learning rate, because along learned directions the
loss is far steeper and more curved.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError
from permille.package.measurements import best_epsilon, precision_rows
from permille.package.reader import Package
from permille.zo.directions import Distribution
from permille.zo.layers import NO_LAYERS, DirectionLayers
from permille.zo.log import BasisUse, BlockSplit, EstimatorKind, LogHeader, Schedule
from permille.zo.package_layers import basis_of, exponents_of
from permille_agent.options import SPLIT_QUERIES, TrainOptions
from permille_agent.prepare import Prepared
from permille_agent.rows import TrainingBatches

# Of a run's steps along learned directions: at most a quarter, and at most so many for each of them.
LEARNED_SHARE = 4
LEARNED_PER_RANK = 2
_ROWS = 1 << 14


class Phase(StrEnum):
    """Which directions a step is along."""

    LEARNED = "learned"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every phase of a run works with; nothing in it changes.

    Attributes:
        layers: of the package, as far as the options use them.
        decoder_layers: blocks of the model, each of the same number of tensors.
        measured_epsilon: where the package's maker measured the smallest error of the projected gradient.
    """

    engine: Engine
    package_digest: str
    mask_digest: str
    counts: tuple[int, ...]
    w_base_K: NDArray[np.float32]
    prepared: Prepared
    options: TrainOptions
    batches: TrainingBatches
    layers: DirectionLayers = NO_LAYERS
    decoder_layers: int = 1
    measured_epsilon: float | None = None

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The kinds of directions that the run uses, in order."""
        return (Phase.PLAIN,) if self.layers.basis is None else (Phase.LEARNED, Phase.PLAIN)

    def header(
        self,
        *,
        seed: int,
        epsilon: float,
        learning_rate: float = 1.0,
        step_unit_exponent: int = 0,
        total_steps: int = 1,
        schedule: Schedule = Schedule.CONSTANT,
        basis: BasisUse | None = None,
    ) -> LogHeader:
        """The header of a log of this run; its plain directions unless `basis` says otherwise."""
        split = None
        if self.options.estimator is EstimatorKind.SPLIT:
            split = block_split(self.counts, self.decoder_layers, self.options.queries)
        return LogHeader(
            package_digest=self.package_digest,
            mask_digest=self.mask_digest,
            seed=seed,
            distribution=Distribution.RADEMACHER,
            estimator=self.options.estimator,
            queries=self.options.queries,
            epsilon=epsilon,
            learning_rate=learning_rate,
            schedule=schedule,
            total_steps=total_steps,
            step_unit_exponent=step_unit_exponent,
            counts=self.counts,
            basis=basis,
            exponents=None if self.layers.exponents is None else self.layers.exponents.use(),
            split=split,
        )

    def phase_header(
        self,
        phase: Phase,
        *,
        seed: int,
        epsilon: float,
        learning_rate: float = 1.0,
        step_unit_exponent: int = 0,
        total_steps: int = 1,
        schedule: Schedule = Schedule.CONSTANT,
    ) -> LogHeader:
        """The header of a thrown-away log whose steps are all of one phase."""
        return self.header(
            seed=seed,
            epsilon=epsilon,
            learning_rate=learning_rate,
            step_unit_exponent=step_unit_exponent,
            total_steps=total_steps,
            schedule=schedule,
            basis=self.basis_use(phase, steps=total_steps, epsilon=epsilon, learning_rate=learning_rate),
        )

    def basis_use(self, phase: Phase, *, steps: int, epsilon: float, learning_rate: float) -> BasisUse | None:
        """What a header says whose first steps are of this phase."""
        if phase is Phase.PLAIN or self.layers.basis is None:
            return None
        return self.layers.basis.use(steps=steps, epsilon=epsilon, learning_rate=learning_rate)

    def learned_steps(self, total_steps: int) -> int:
        """How many of a run's steps are along learned directions; 0 where it is too short for any."""
        if self.layers.basis is None:
            return 0
        return min(total_steps // LEARNED_SHARE, LEARNED_PER_RANK * self.layers.basis.rank)


def step_spread(header: LogHeader, layers: DirectionLayers = NO_LAYERS) -> float:
    """Length of the first step of learning rate and projected gradients 1.

    `sqrt(sum over blocks of n * (1 / q + (1 - 1 / q) / r))`, n a block's sum of variances, r the number of
    dimensions that its directions really fill (`_filled`). Plain directions have unit variance and fill all:
    `k / q`, the mean of q of them is `sqrt(q)` times shorter than one. Where directions share a strong one,
    the parts of their mean along it do not cancel: each projected gradient has the sign of its own.
    """
    total = 0.0
    for queries, tensors in header.blocks():
        number = queries.stop - queries.start
        variance, filled = _filled(header, layers, header.weights_of(tensors))
        total += variance * (1 / number + (1 - 1 / number) / filled)
    return math.sqrt(total)


def _filled(header: LogHeader, layers: DirectionLayers, weights: slice) -> tuple[float, float]:
    """Of a block's directions in step 0: the sum of their variances, and the participation ratio
    `(tr M)^2 / tr M^2` of their covariance M, 1 to k; infinite for plain ones, of whose k nothing is left."""
    basis, exponents = layers.basis_of(header), layers.exponents_of(header)
    if basis is not None and header.basis_steps:
        gram_RR = np.zeros((basis.rank, basis.rank))
        for first in range(weights.start, weights.stop, _ROWS):
            rows_KR = basis.u_KR[first : min(first + _ROWS, weights.stop)].astype(np.float32)
            gram_RR += rows_KR.T @ rows_KR
        trace, squares = float(np.trace(gram_RR)), float((gram_RR * gram_RR).sum())
    elif exponents is not None:
        variances_K = np.exp2(2.0 * exponents.e_K[weights])
        trace, squares = float(variances_K.sum()), float((variances_K * variances_K).sum())
    else:
        return float(weights.stop - weights.start), math.inf
    if not squares:  # nothing in this block moves
        return 0.0, math.inf
    return trace / header.sigma_at(0) ** 2, trace * trace / squares


def widest_block(header: LogHeader) -> int:
    """The most directions that a block has: their coefficients are the smallest."""
    sizes: list[int] = [queries.stop - queries.start for queries, _ in header.blocks()]
    return max(sizes)


def block_split(counts: tuple[int, ...], decoder_layers: int, queries: int) -> BlockSplit:
    """Two blocks of about the same number of layers, from the first one that is masked to the last.

    Raises:
        InputError: fewer than two layers are masked.
    """
    size = len(counts) // decoder_layers
    masked = [layer for layer in range(decoder_layers) if any(counts[layer * size : (layer + 1) * size])]
    if size * decoder_layers != len(counts) or len(masked) < 2:
        raise InputError(f"expected masks in two layers or more for a split, got {len(masked)}")
    middle = (masked[0] + masked[-1] + 1) // 2
    return BlockSplit(first_upper_tensor=middle * size, lower_queries=queries // SPLIT_QUERIES)


def training_layers(package: Package, options: TrainOptions) -> DirectionLayers:
    """The package's layers that the options ask for, as far as it has them."""
    return DirectionLayers(
        basis=basis_of(package) if options.basis else None,
        exponents=exponents_of(package) if options.scaling else None,
    )


def measured_epsilon(package: Package, engine: Engine) -> float | None:
    """Where the package says that the error is smallest in float32; None where it says nothing that is of the
    form, or the engine's arithmetic is coarser."""
    if engine.info()["compute_dtype"] not in ("float32", "float64"):
        return None
    return best_epsilon(precision_rows(package.measurements()))
