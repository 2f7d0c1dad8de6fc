"""Simulate how often useless and useful models are adopted: `make bench-decision`.

The simulation compares the agent's rule with a bootstrap, which adopts if its 95 % percentile interval is
above 0. Each trial draws the gains per token of groups of a person's held-out documents. Their true mean
is known. Most of the distributions are skewed: a few groups lose much. If none of these groups is in the
sample, a bootstrap cannot know of such losses.

Short text is judged in parts. Its groups have few tokens and are consecutive, so neighbours are similar.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from permille_agent.embed import compare_losses
from permille_lab.measuring.cells import Cells, Result, settings_parser

SPREAD = 0.3
"""Standard deviation of the gains of groups in nats per token, as measured on people's tweets."""
HURT = 0.05
GROUPS = (20, 40, 100)
GAINS = (0.0, 0.01, 0.1, 0.2, 0.4)
"""True mean gains. A gain of at most the agent's margin should be refused."""
LITTLE_GROUPS = 31
"""Number of groups of 24 tokens for a person with 1,000 tokens. Three of the four parts are judged."""
ALIKE = (0.0, 0.3, 0.6)
"""Correlation of the gains of neighbouring groups; 0.3 is that of people's tweets."""
_PART_GAINS = (0.5, 0.8, 1.0)
"""Gain in each judged part, as a share of the adopted state's gain.

The states that judge the parts were trained on less text than the adopted state.
"""
_RESAMPLES = 2000
_LEAST_TOKENS, _MOST_TOKENS = 64, 300

Draw = Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    return rng.standard_normal(shape)


def _exponential(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Draw gains of which a few groups lose much."""
    return 1.0 - rng.standard_exponential(shape)


def _lognormal(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Draw gains of which fewer groups lose more."""
    drawn = np.exp(rng.standard_normal(shape))
    found: NDArray[np.float64] = (np.exp(0.5) - drawn) / np.sqrt((np.e - 1) * np.e)
    return found


def _hurt(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Draw gains of which one group in twenty loses much. All others have the same small gain."""
    hurt = rng.random(shape) < HURT
    found: NDArray[np.float64] = np.where(hurt, HURT - 1.0, HURT) / np.sqrt(HURT * (1 - HURT))
    return found


DRAWS: Mapping[str, Draw] = {
    "normal": _normal,
    "exponential": _exponential,
    "lognormal": _lognormal,
    "one in twenty hurt": _hurt,
}
"""Distributions with mean 0 and standard deviation 1."""


def measure(draw: str, groups: int, *, gain: float, trials: int) -> Result:
    """Return the share of trials in which each rule adopts."""
    rng = np.random.default_rng([groups, round(1000 * gain), list(DRAWS).index(draw)])
    gain_TG = gain + SPREAD * DRAWS[draw](rng, (trials, groups))
    tokens_TG = rng.integers(_LEAST_TOKENS, _MOST_TOKENS, (trials, groups))
    nats_TG = gain_TG * tokens_TG
    adopted = [
        compare_losses(gain_G, tokens_G).better for gain_G, tokens_G in zip(gain_TG, tokens_TG, strict=True)
    ]
    # All trials share these resamples: the number of times that each group was drawn.
    drawn_RG = rng.multinomial(groups, np.full(groups, 1 / groups), _RESAMPLES).astype(np.float64)
    rate_TR = (nats_TG @ drawn_RG.T) / (tokens_TG @ drawn_RG.T)
    bootstrap = np.quantile(rate_TR, 0.025, axis=1) > 0
    return {"evidence": float(np.mean(adopted)), "bootstrap": float(bootstrap.mean())}


def measure_little(draw: str, alike: float, *, gain: float, trials: int) -> Result:
    """Return the share of trials in which a model is adopted, for a person with 1,000 tokens."""
    rng = np.random.default_rng(
        [LITTLE_GROUPS, round(1000 * gain), round(10 * alike), list(DRAWS).index(draw)]
    )
    # A group copies the one before with probability `alike`. Thus neighbours are correlated, and the
    # distribution of each group stays the same.
    own_TG = DRAWS[draw](rng, (trials, LITTLE_GROUPS))
    copies_TG = rng.random((trials, LITTLE_GROUPS)) < alike
    for group in range(1, LITTLE_GROUPS):
        own_TG[:, group] = np.where(copies_TG[:, group], own_TG[:, group - 1], own_TG[:, group])
    # A gain of at most the margin is the same in every part. A larger gain grows with the trained text.
    parts_G = np.repeat(_PART_GAINS, [11, 10, 10]) if gain > 0.01 else np.ones(LITTLE_GROUPS)
    gain_TG = gain * parts_G + SPREAD * own_TG
    tokens_G = np.full(LITTLE_GROUPS, 24)
    return {"adopted": float(np.mean([compare_losses(gain_G, tokens_G).better for gain_G in gain_TG]))}


def main() -> None:
    """Simulate the missing cells. All cells take about a minute."""
    parser = settings_parser(__doc__, "decision")
    parser.add_argument("--trials", type=int, default=4000)
    options = parser.parse_args()
    cells = Cells(options.cells)
    for draw in DRAWS:
        for groups in GROUPS:
            for gain in GAINS:
                settings = {"draw": draw, "groups": groups, "gain": gain, "trials": options.trials}
                run = partial(measure, draw, groups, gain=gain, trials=options.trials)
                cells.once("decision", settings, run)
        for alike in ALIKE:
            for gain in GAINS:
                settings = {"draw": draw, "alike": alike, "gain": gain, "trials": options.trials}
                run = partial(measure_little, draw, alike, gain=gain, trials=options.trials)
                cells.once("little", settings, run)


if __name__ == "__main__":
    main()
