"""Statistical test whether one model is better than another on a person's text.

The decision rests on an e-value, a bet against "the mean gain is at most the margin" whose wealth nobody can
expect to grow where that is true (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables
by betting"). For groups of neighbouring passages, whose gain is in nats per token,

    W = mean over bets b of  product over groups of  max(0, 1 + b (gain_g - margin))

and `W >= 1 / alpha` has at most probability alpha there, whatever the skew of the gains, as long as groups
are independent and none is worse by more than `1 / b`, 2/3 nats per token. A bootstrap knows only the groups
that it was shown. If one group in twenty is badly hurt, it adopts two to four of ten useless models. W of
groups that came later, judged by a state that had not seen them, may be multiplied. So a short text can be
judged part by part.

Deviation from the paper: fixed bets, equally mixed, instead of bets that follow the data, so that the order
of the groups does not matter.

Shapes: G groups, B bets.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError

MARGIN = 0.01
"""Nats a token that a model must gain to be worth a change."""
ALPHA = 0.025
"""Probability of one false adoption over all decisions on one person's data."""
MIN_GROUPS = 20
GROUP_TOKENS = 32
"""Documents with fewer targets are judged together."""
_WIDEST = 20.0
_BETS_B1 = np.array([0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5])[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The measured reduction of the loss, in nats per token, and its certainty.

    The loss of the second model is subtracted from that of the first.

    Attributes:
        improvement: loss of the first minus loss of the second over all groups.
        low: the largest margin that the gain surely exceeds.
        high: the smallest margin that the gain surely does not reach.
        groups: how many were compared.
        better: whether the second may replace the first.
    """

    improvement: float
    low: float
    high: float
    groups: int
    better: bool

    def __str__(self) -> str:
        return f"{self.improvement:+.4f} nats per token (at least {self.low:+.4f}, at most {self.high:+.4f})"


def alpha_of(decision: int) -> float:
    """Return the share of `ALPHA` for decision number j: `6 / (pi j)^2`. The shares add up to 1.

    Raises:
        InputError: a number below 1.
    """
    if decision < 1:
        raise InputError(f"expected the number of a decision, from 1, got {decision}")
    return ALPHA * 6.0 / (math.pi * decision) ** 2


def compare_losses(
    gain_G: NDArray[np.float64], tokens_G: NDArray[np.int64], *, decision: int = 1
) -> Comparison:
    """Compare two models by what the second gains in each group.

        gain_G = (base.nats_D - personal.nats_D) / base.tokens_D

    Args:
        gain_G: nats per token; not finite where a loss was not.
        tokens_G: targets of each group.
        decision: the number of this decision on this person's data, from 1.

    Raises:
        InputError: lengths that differ, no group, or a group without a target.
    """
    if not len(gain_G) == len(tokens_G) >= 1 or tokens_G.min() < 1:
        raise InputError(
            f"expected a gain and a number of targets for each group, got {len(gain_G)} gains and "
            f"{tokens_G.tolist()[:3]}... targets of {len(tokens_G)} groups"
        )
    wanted, groups = -math.log(alpha_of(decision)), len(gain_G)
    if not np.isfinite(gain_G).all():
        return Comparison(improvement=-math.inf, low=-math.inf, high=math.inf, groups=groups, better=False)
    better = groups >= MIN_GROUPS and log_e_value(gain_G, MARGIN) >= wanted
    return Comparison(
        improvement=float(np.average(gain_G, weights=tokens_G)),
        low=_surely_above(gain_G, wanted),
        high=-_surely_above(-gain_G, wanted),
        groups=groups,
        better=bool(better),
    )


def log_e_value(gain_G: NDArray[np.float64], margin: float) -> float:
    """The natural logarithm of W against "the mean gain is at most `margin`"."""
    with np.errstate(divide="ignore"):
        wealth_B = np.log(np.maximum(1.0 + _BETS_B1 * (gain_G - margin), 0.0)).sum(axis=1)
    largest = float(wealth_B.max())
    return largest if math.isinf(largest) else largest + math.log(float(np.exp(wealth_B - largest).mean()))


def _surely_above(gain_G: NDArray[np.float64], wanted: float) -> float:
    """The largest margin against which the e-value suffices, to a thousandth of a nat: it falls with it."""
    low, high = -_WIDEST, _WIDEST
    while high - low > 1e-3:
        middle = (low + high) / 2
        if log_e_value(gain_G, middle) >= wanted:
            low = middle
        else:
            high = middle
    return low


def merged(tokens_D: NDArray[np.int64], least: int = GROUP_TOKENS) -> NDArray[np.int64]:
    """The group of each document, int64 [D]: neighbours together until a group has `least` targets.

    What is left at the end joins the last group. Documents without a target belong to the group before them.
    """
    group_D = np.zeros(len(tokens_D), dtype=np.int64)
    group = have = 0
    for place, tokens in enumerate(tokens_D.tolist()):
        if tokens and have >= least and int(tokens_D[place:].sum()) >= least:
            group, have = group + 1, 0
        group_D[place] = group
        have += tokens
    return group_D
