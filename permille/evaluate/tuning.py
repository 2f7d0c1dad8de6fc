"""Equal chances for every method: the same number of trials on a logarithmic grid, extended at its edges.

Random masks want a step some hundred times larger than sensitive ones; one fixed step size would fake the
claim that sensitive ones are better. So each method gets `trials` step factors around its natural one, and
while the best lies on an edge the grid grows there, at most `extensions` times; what a method took is
reported. Tuning seeds and reporting seeds never meet.

A step size at the edge of what is stable is good or bad by the seed. With several tuning seeds the first one
finds the best and its neighbours, and among these the lowest median over all seeds wins.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from permille.errors import InputError

GRID_FACTOR = math.sqrt(10)
TUNING_SEED_OFFSET = 1_000_000
"""Reporting seeds are below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The step factor that won, and every trial's validation loss by power of `GRID_FACTOR`.

    Attributes:
        losses: of the first tuning seed.
        medians: over all tuning seeds, of the powers that others tried too.
        on_edge: the best is still at an end of the grid: the number of extensions was not enough.
    """

    step_factor: float
    losses: Mapping[int, float]
    medians: Mapping[int, float]
    on_edge: bool


def tune(
    loss_at: Callable[[float], float],
    *others: Callable[[float], float],
    trials: int = 3,
    extensions: int = 4,
) -> Tuned:
    """Find the step factor of the lowest validation loss.

    Args:
        loss_at: trains with a step factor and the first tuning seed; NaN where it diverged.
        others: the same with further tuning seeds, which try the best and its neighbours.
        trials: odd; powers from `-(trials // 2)` to `trials // 2`. One trial is no search: its factor is 1.

    Raises:
        InputError: an even number of trials, or none of them gave a finite loss.
    """
    if trials < 1 or trials % 2 == 0:
        raise InputError(f"expected an odd number of trials, got {trials}")
    losses: dict[int, float] = {}
    wanted = list(range(-(trials // 2), trials // 2 + 1))
    while True:
        for power in wanted:
            losses[power] = _finite(loss_at(GRID_FACTOR**power))
        best = min(losses, key=lambda power: (losses[power], power))
        edge = best - 1 if best == min(losses) else best + 1 if best == max(losses) else None
        if edge is None or trials == 1 or len(losses) >= trials + extensions:
            break
        wanted = [edge]
    if not math.isfinite(losses[best]):
        raise InputError(f"expected a finite loss at some step factor, got none of {sorted(losses)}")
    near = [power for power in (best - 1, best, best + 1) if power in losses] if others and trials > 1 else []
    medians = {
        power: statistics.median([losses[power], *(_finite(other(GRID_FACTOR**power)) for other in others)])
        for power in near
    }
    chosen = min(near, key=lambda power: (medians[power], power)) if near else best
    return Tuned(
        step_factor=GRID_FACTOR**chosen,
        losses=losses,
        medians=medians,
        on_edge=edge is not None and trials > 1 and chosen == best,
    )


def tuning_seed(seed: int) -> int:
    """A seed that no report uses.

    Raises:
        InputError: the reporting seed is not below `TUNING_SEED_OFFSET`.
    """
    if not 0 <= seed < TUNING_SEED_OFFSET:
        raise InputError(f"expected a reporting seed from 0 to {TUNING_SEED_OFFSET - 1}, got {seed}")
    return seed + TUNING_SEED_OFFSET


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
