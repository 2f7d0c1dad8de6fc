"""Equal chances for every method: the same number of trials on a logarithmic grid, extended at its edges.

Random masks want a step some hundred times larger than sensitive ones. One fixed step size would fake the
claim that sensitive ones are better. So each method gets `trials` step factors around its natural one. While
the best lies on an edge, the grid grows there, at most `extensions` times. Reports say how many trials a
method took. Tuning seeds and reporting seeds never meet.

A step size at the edge of stability is good or bad by the seed. With several tuning seeds, the first one
finds the best factor and its neighbours. Among these, the lowest median over all seeds wins. The median is of
the losses that a reported run would keep: a run that rose above the base begins anew with the next smaller
step (`training.train_safely`). With one seed this makes no difference inside the grid, because the lowest
loss of single runs is also the lowest of runs that begin anew.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from permille.errors import InputError

GRID_FACTOR = math.sqrt(10)
TIE = 1e-5
"""Relative difference of losses below which the shorter step is taken: a run that fell back to it has its
loss, but for rounding."""

MAX_ATTEMPTS = 3
"""How often a reported run is begun at most; each time with the next smaller step of the grid."""

TUNING_SEED_OFFSET = 1_000_000
"""Reporting seeds are below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run from the base: its best validation loss (NaN if there is none).

    It also says whether a reported run would begin anew after it.
    """

    loss: float
    rose: bool = False


Run = Callable[[float], Trial]
"""Trains with a step factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The step factor that won, and the trials' validation losses by power of `GRID_FACTOR`.

    Attributes:
        losses: of the first tuning seed's single runs.
        medians: over all tuning seeds, of what reported runs would keep that begin with this power; of the
            powers that the other seeds tried too.
        runs: every trial, by tuning seed and power: also those below the grid that runs would fall back to.
        on_edge: the best is still at an end of the grid: the number of extensions was not enough.
    """

    step_factor: float
    losses: Mapping[int, float]
    medians: Mapping[int, float]
    runs: Sequence[Mapping[int, Trial]]
    on_edge: bool


def tune(run: Run, *others: Run, trials: int = 3, extensions: int = 4) -> Tuned:
    """Find the step factor of the lowest validation loss.

    Args:
        run: of the first tuning seed.
        others: of further tuning seeds, which try the best and its neighbours, and go on as long as a
            neighbour is better.
        trials: odd; powers from `-(trials // 2)` to `trials // 2`.
        extensions: how many powers may be added to them.

    Raises:
        InputError: an even number of trials, or none of them gave a finite loss.
    """
    if trials < 3 or trials % 2 == 0:
        raise InputError(f"expected an odd number of trials, got {trials}")
    seeds = [_Seed(one) for one in (run, *others)]
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
        step_factor=GRID_FACTOR**chosen,
        losses=losses,
        medians=medians,
        runs=[seed.known for seed in seeds],
        on_edge=on_edge,
    )


class _Seed:
    """The runs of one tuning seed, each once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.known: dict[int, Trial] = {}

    def loss(self, power: int) -> float:
        """Of one run."""
        loss = self._at(power).loss
        return loss if math.isfinite(loss) else math.inf

    def kept(self, power: int) -> float:
        """The loss that a reported run would keep: the best of its attempts."""
        best = math.inf
        for attempt in range(MAX_ATTEMPTS):
            best = min(best, self.loss(power - attempt))
            if not self._at(power - attempt).rose:
                break
        return best

    def _at(self, power: int) -> Trial:
        if power not in self.known:
            self.known[power] = self._run(GRID_FACTOR**power)
        return self.known[power]


def _by_median(
    seeds: list[_Seed], chosen: int, losses: dict[int, float], medians: dict[int, float], limit: int
) -> int:
    """The power whose median is below its neighbours'; adds to losses (at most `limit`) and medians."""
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
