"""Measure how well an attacker detects whether a device took part in rounds: `make bench-privacy`.

The attacker reads the published sums. It also knows exactly which integers the target would send in each
round, which is more than its text. In half of the trials, the target sent these integers. In the others, it
sent zeros.

There are two attackers. One also knows the integers of all other devices. The promise (epsilon, delta) holds
against this attacker. The other knows only the target and the direction that all devices have in common. This
is more realistic, since other devices hide the target. Each attacker subtracts what it knows, takes the inner
product with the target's integers, and sums over the rounds. No test is better against Gaussian noise.

Devices are synthetic, and the noise is drawn by the product's code. A device sends a vector of 64 integers.
Its Euclidean norm is the clip. Each vector has a part that is common to all devices (`MEAN_NORM`), as in the
product's prediction of the signal.
"""

import math
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_rounds.privacy.discrete_gaussian import draw_noise
from permille_rounds.privacy.rules import Privacy, PrivacyMode
from permille_rounds.privacy.zcdp import MEAN_NORM, noise_for, rho_of

CLIP, INTEGERS = 1000, 64
ROUNDS = 10
EPSILONS = (None, 8.0, 4.0, 2.0)
COHORTS = (10, 100, 1000)
_DELTA_EXPONENT = 6


def measure(dp_epsilon: float | None, devices: int, *, knows_others: bool, trials: int) -> Result:
    """Return the attacker's AUC, its standard error, and the largest AUC that the noise allows."""
    rng = np.random.default_rng([devices, int(knows_others), int(10 * (dp_epsilon or 0))])
    noise = 0 if dp_epsilon is None else noise_for(dp_epsilon, 10.0**-_DELTA_EXPONENT, ROUNDS)
    scores: dict[bool, list[float]] = {True: [], False: []}
    for trial in range(2 * trials):
        present = bool(trial % 2)
        score = 0.0
        for _ in range(ROUNDS):
            common_V, c_DV = _vectors(rng, devices)
            others_V = c_DV[1:].sum(axis=0)
            seen_V = others_V + present * c_DV[0]
            if noise:
                seen_V = seen_V + _noise(noise, rng)
            if knows_others:
                score += float((seen_V - others_V) @ c_DV[0])
            else:
                score += float(seen_V @ (c_DV[0] - common_V * (common_V @ c_DV[0])))
        scores[present].append(score)
    auc = _auc(np.array(scores[True]), np.array(scores[False]))
    error = math.sqrt(max(auc * (1 - auc), 1 / trials) / trials)
    most = NormalDist().cdf(math.sqrt(rho_of(noise / 100, ROUNDS))) if noise else 1.0
    return {"auc": auc, "error": error, "most": most, "noise_multiplier": noise / 100}


def _vectors(rng: np.random.Generator, devices: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the common direction [V] and the integers of all devices [D, V]. The target is the first one."""
    common_V = rng.standard_normal(INTEGERS)
    common_V /= np.linalg.norm(common_V)
    own_DV = rng.standard_normal((devices, INTEGERS))
    own_DV /= np.linalg.norm(own_DV, axis=1)[:, None]
    all_DV = MEAN_NORM * common_V + math.sqrt(1 - MEAN_NORM**2) * own_DV
    length_D = np.linalg.norm(all_DV, axis=1)
    return common_V, np.trunc(CLIP * all_DV / length_D[:, None]).astype(np.int64)


def _noise(hundredths: int, rng: np.random.Generator) -> NDArray[np.int64]:
    privacy = Privacy(
        mode=PrivacyMode.CENTRAL,
        noise_hundredths=hundredths,
        participations=ROUNDS,
        delta_exponent=_DELTA_EXPONENT,
    )
    return draw_noise(INTEGERS, privacy.variance(CLIP), lambda below: int(rng.integers(below)))


def _auc(present: NDArray[np.float64], absent: NDArray[np.float64]) -> float:
    """Return the share of pairs that the score puts in the right order. Equal scores count half."""
    order = np.sort(absent)
    below = np.searchsorted(order, present, side="left") + np.searchsorted(order, present, side="right")
    return float(below.sum()) / (2 * len(present) * len(absent))


def main() -> None:
    """Measure the missing cells. All cells take some minutes."""
    parser = settings_parser(__doc__, "privacy")
    parser.add_argument("--trials", type=int, default=300)
    options = parser.parse_args()
    cells = Cells(options.cells)
    for knows_others in (True, False):
        for devices in COHORTS[:1] if knows_others else COHORTS:
            for dp_epsilon in EPSILONS:
                settings = {
                    "knows_others": knows_others,
                    "devices": devices,
                    "dp_epsilon": dp_epsilon,
                    "rounds": ROUNDS,
                    "trials": options.trials,
                }
                run = partial(measure, dp_epsilon, devices, knows_others=knows_others, trials=options.trials)
                cells.once("attack", settings, run)


if __name__ == "__main__":
    main()
