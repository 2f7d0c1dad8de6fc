"""Search for the step factor of a method. All methods have the same grid and the same number of trials.

Random masks need a step some hundred times larger than sensitive ones. With one fixed step size, sensitive
masks would seem better than they are. So each method tries `trials` step factors around its natural step
size. While the best factor is at an edge of the logarithmic grid, the grid grows there, at most by
`extensions` factors. Tuning seeds are never reporting seeds.

At the edge of stability, a step size is good for one seed and bad for another. If there are several tuning
seeds, the first one finds the best factor and its neighbours. Of these, the factor with the lowest median
over all seeds wins. The median is taken over the losses that a reported run would keep. Such a run starts
again with the next smaller step if its loss rose above that of the base (`training.train_safely`). With one
seed this makes no difference inside the grid: the lowest loss of single runs is also the lowest loss of runs
with further attempts.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from permille.errors import InputError

GRID_FACTOR = math.sqrt(10)
TIE = 1e-5
"""Relative difference of losses below which the smaller step factor wins.

A run that falls back to a smaller factor keeps that factor's loss, except for rounding.
"""

MAX_ATTEMPTS = 3
"""Largest number of attempts of a reported run. Each attempt takes the next smaller step of the grid."""

TUNING_SEED_OFFSET = 1_000_000
"""All reporting seeds are below this number, and all tuning seeds are at or above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run from the base.

    Attributes:
        loss: best validation loss, NaN if there is none.
        rose: True if a reported run would start again after this run.
    """

    loss: float
    rose: bool = False


Run = Callable[[float], Trial]
"""Trains with a step factor and returns the trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The chosen step factor, and the trials' validation losses by power of the grid's factor.

    Attributes:
        losses: losses of single runs with the first tuning seed.
        medians: medians over all tuning seeds of the losses that reported runs would keep. Only for powers
            that all seeds tried; empty if there is one tuning seed.
        runs: every trial, by tuning seed and power. Powers below the grid are those that runs fall back to.
        on_edge: True if the best factor is at an edge of the grid, so there were too few extensions.
    """

    step_factor: float
    losses: Mapping[int, float]
    medians: Mapping[int, float]
    runs: Sequence[Mapping[int, Trial]]
    on_edge: bool


def tune(
    run: Run,
    *others: Run,
    trials: int = 3,
    extensions: int = 4,
    middle: float = 1.0,
    factor: float = GRID_FACTOR,
) -> Tuned:
    """Find the step factor with the lowest validation loss.

    Args:
        run: trains with the first tuning seed.
        others: train with the further tuning seeds. They try the best factor and its neighbours, and
            continue while a neighbour is better.
        trials: number of first powers, odd and at least 3: from `-(trials // 2)` to `trials // 2`.
        extensions: largest number of powers that may be added.
        middle: step factor of power 0.
        factor: ratio of two neighbours of the grid.

    Raises:
        InputError: `trials` is even or below 3, or no trial had a finite loss.
    """
    if trials < 3 or trials % 2 == 0:
        raise InputError(f"expected an odd number of trials, got {trials}")
    seeds = [_Seed(one, lambda power: middle * factor**power) for one in (run, *others)]
    first = seeds[0]
    losses: dict[int, float] = {}
    wanted = list(range(-(trials // 2), trials // 2 + 1))
    while True:
        for power in wanted:
            losses[power] = first.loss(power)
        chosen = min(losses, key=lambda power: (losses[power], power))
        edge = chosen - 1 if chosen == min(losses) else chosen + 1 if chosen == max(losses) else None
        on_edge = edge is not None
        if edge is None or len(losses) >= trials + extensions:
            break
        wanted = [edge]
    if not math.isfinite(losses[chosen]):
        raise InputError(f"expected a finite loss at some step factor, got none of {sorted(losses)}")
    medians: dict[int, float] = {}
    if others:
        chosen = _by_median(seeds, chosen, losses, medians, trials + extensions)
        on_edge = not {chosen - 1, chosen + 1} <= medians.keys()
    return Tuned(
        step_factor=middle * factor**chosen,
        losses=losses,
        medians=medians,
        runs=[seed.known for seed in seeds],
        on_edge=on_edge,
    )


class _Seed:
    """The runs of one tuning seed. Each power runs once."""

    def __init__(self, run: Run, step_factor: Callable[[int], float]) -> None:
        self._run = run
        self._step_factor = step_factor
        self.known: dict[int, Trial] = {}

    def loss(self, power: int) -> float:
        """Return the loss of one run, infinity if it is not finite."""
        loss = self._at(power).loss
        return loss if math.isfinite(loss) else math.inf

    def kept(self, power: int) -> float:
        """Return the loss that a reported run would keep, the lowest of its attempts."""
        best = math.inf
        for attempt in range(MAX_ATTEMPTS):
            best = min(best, self.loss(power - attempt))
            if not self._at(power - attempt).rose:
                break
        return best

    def _at(self, power: int) -> Trial:
        if power not in self.known:
            self.known[power] = self._run(self._step_factor(power))
        return self.known[power]


def _by_median(
    seeds: list[_Seed], chosen: int, losses: dict[int, float], medians: dict[int, float], limit: int
) -> int:
    """Return the power with the lowest median, after its neighbours were tried too.

    Add what was tried to `losses` (at most `limit` powers) and `medians`.
    """
    while True:
        for power in (chosen - 1, chosen, chosen + 1):
            if power not in medians and (power in losses or len(losses) < limit):
                losses[power] = seeds[0].loss(power)
                medians[power] = statistics.median(seed.kept(power) for seed in seeds)
        lowest = min(medians.values())
        best = min(power for power, median in medians.items() if median <= lowest * (1 + TIE))
        if best == chosen:
            return chosen
        chosen = best


def tuning_seed(seed: int) -> int:
    """Return a seed that no report uses.

    Raises:
        InputError: the reporting seed is not below `TUNING_SEED_OFFSET`.
    """
    if not 0 <= seed < TUNING_SEED_OFFSET:
        raise InputError(f"expected a reporting seed from 0 to {TUNING_SEED_OFFSET - 1}, got {seed}")
    return seed + TUNING_SEED_OFFSET
