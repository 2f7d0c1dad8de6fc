"""What every phase of a run works with, and the headers of its logs."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError
from permille.package.reader import Package
from permille.zo.estimators import Descent
from permille.zo.exponents import Exponents, exponents_of
from permille.zo.header import BlockSplit, EstimatorKind, LogHeader, Schedule
from permille_agent.text.preparation import Prepared
from permille_agent.text.rows import TrainingBatches
from permille_agent.training.options import SPLIT_QUERIES, TrainOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every phase of a run works with; nothing in it changes.

    Attributes:
        exponents: of the package, where the options use them.
        decoder_layers: blocks of the model, each of the same number of tensors.
    """

    engine: Engine
    package_digest: str
    mask_digest: str
    counts: tuple[int, ...]
    w_base_K: NDArray[np.float32]
    prepared: Prepared
    options: TrainOptions
    batches: TrainingBatches
    exponents: Exponents | None = None
    decoder_layers: int = 1

    def header(
        self,
        *,
        seed: int,
        epsilon: float,
        learning_rate: float = 1.0,
        step_unit_exponent: int = 0,
        total_steps: int = 1,
        schedule: Schedule = Schedule.CONSTANT,
    ) -> LogHeader:
        """The header of a log of this run."""
        split = None
        if self.options.estimator is EstimatorKind.SPLIT:
            split = block_split(self.counts, self.decoder_layers, self.options.queries)
        return LogHeader(
            package_digest=self.package_digest,
            mask_digest=self.mask_digest,
            seed=seed,
            estimator=self.options.estimator,
            queries=self.options.queries,
            epsilon=epsilon,
            learning_rate=learning_rate,
            schedule=schedule,
            total_steps=total_steps,
            step_unit_exponent=step_unit_exponent,
            counts=self.counts,
            exponents=None if self.exponents is None else self.exponents.use,
            split=split,
        )

    def descent(self, header: LogHeader) -> Descent:
        """What the steps of a log of this run have in common."""
        return Descent(header=header, w_base_K=self.w_base_K, exponents=self.exponents)


def step_spread(header: LogHeader, exponents: Exponents | None = None) -> float:
    """Length of the first step of learning rate and projected gradients 1.

    `sqrt(sum over blocks of n * (1 / q + (1 - 1 / q) / r))`, n a block's sum of variances, r the number of
    dimensions that its directions really fill (`_filled`). Without exponents directions have unit variance
    and fill all: `k / q`, the mean of q of them is `sqrt(q)` times shorter than one. Where directions share a
    strong one, the parts of their mean along it do not cancel: each projected gradient has the sign of its
    own.
    """
    total = 0.0
    for queries, tensors in header.blocks():
        number = queries.stop - queries.start
        variance, filled = _filled(header, exponents, header.weights_of(tensors))
        total += variance * (1 / number + (1 - 1 / number) / filled)
    return math.sqrt(total)


def _filled(header: LogHeader, exponents: Exponents | None, weights: slice) -> tuple[float, float]:
    """Of a block's directions in step 0: the sum of their variances, and the participation ratio
    `(tr M)^2 / tr M^2` of their covariance M, 1 to k; infinite without exponents, where it is large."""
    e_K = header.needed_exponents(exponents)
    if e_K is not None:
        variances_K = np.exp2(2.0 * e_K[weights])
        trace, squares = float(variances_K.sum()), float((variances_K * variances_K).sum())
    else:
        return float(weights.stop - weights.start), math.inf
    if not squares:  # nothing in this block moves
        return 0.0, math.inf
    return trace / header.sigma**2, trace * trace / squares


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


def training_exponents(package: Package, options: TrainOptions) -> Exponents | None:
    """The package's exponents where the options ask for them and it has them."""
    return exponents_of(package) if options.scaling else None
