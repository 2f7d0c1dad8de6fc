"""Statistical test of whether one model is better than another on a person's text.

The gain of a group of neighbouring passages is the reduction of its loss by the second model, in nats per
token. The test uses an e-value: the wealth of a bet against the hypothesis "the mean gain is at most the
margin". If the hypothesis is true, the expected wealth does not grow (Waudby-Smith and Ramdas 2024,
"Estimating means of bounded random variables by betting"). The wealth is

    W = mean over bets b of  product over groups of  max(0, 1 + b (gain_g - margin))

and under the hypothesis, `W >= 1 / alpha` has a probability of at most alpha. This holds for any skew of the
gains, if groups are independent and no gain is below `margin - 1 / b` for the largest bet b. With the values
below, this bound is about -0.66 nats per token.

A bootstrap would not be safe, because it knows only the observed groups. If one group in twenty becomes much
worse, a bootstrap adopts two to four of ten useless models.

Different groups may judge different states. A state may be trained on earlier groups, but not on the groups
that judge it or on later ones. The product still runs over all groups. So a short text can be tested in
parts.

Deviation from the paper: the bets are fixed and equally mixed, so the order of the groups does not matter.

Shapes: G groups, B bets.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError

MARGIN = 0.01
"""Smallest gain that justifies a change of the model, in nats per token."""
ALPHA = 0.025
"""Largest probability of a false adoption, over all decisions on one person's data together."""
MIN_GROUPS = 20
GROUP_TOKENS = 32
"""Smallest number of targets of a group. Smaller documents are merged."""
_WIDEST = 20.0  # range of the bisection for bounds, in nats per token
# The largest bet limits the harm for which the test is valid: no gain may be below MARGIN - 1 / 1.5.
_BETS_B1 = np.array([0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5])[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Reduction of the loss from a first to a second model, in nats per token, with confidence bounds.

    Attributes:
        improvement: loss of the first model minus loss of the second, over all groups.
        low: lower confidence bound of the improvement.
        high: upper confidence bound of the improvement.
        groups: number of compared groups.
        better: whether the second model may replace the first.
    """

    improvement: float
    low: float
    high: float
    groups: int
    better: bool

    def __str__(self) -> str:
        return f"{self.improvement:+.4f} nats per token (at least {self.low:+.4f}, at most {self.high:+.4f})"


def alpha_of(decision: int) -> float:
    """Return the share of `ALPHA` for decision number j, `ALPHA * 6 / (pi j)^2`. The sum of all is `ALPHA`.

    Example:
        >>> round(alpha_of(1), 4), round(alpha_of(2), 4)
        (0.0152, 0.0038)

    Raises:
        InputError: a number below 1.
    """
    if decision < 1:
        raise InputError(f"expected the number of a decision, from 1, got {decision}")
    # The sum of 1 / j^2 over all j is pi^2 / 6.
    return ALPHA * 6.0 / (math.pi * decision) ** 2


def compare_losses(
    gain_G: NDArray[np.float64], tokens_G: NDArray[np.int64], *, decision: int = 1
) -> Comparison:
    """Compare two models by the gain of the second one in each group.

    For example, with the losses of both models on the same documents:

        gain_G = (base.nats_D - personal.nats_D) / base.tokens_D
        compare_losses(gain_G, base.tokens_D).better

    Args:
        gain_G: gain of each group, in nats per token. If one is not finite, the second model is not better.
        tokens_G: number of targets of each group.
        decision: number of this decision on this person's data, from 1.

    Raises:
        InputError: the lengths differ, there is no group, or a group has no target.
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
    """Return the natural logarithm of W for the hypothesis "the mean gain is at most `margin`"."""
    with np.errstate(divide="ignore"):
        wealth_B = np.log(np.maximum(1.0 + _BETS_B1 * (gain_G - margin), 0.0)).sum(axis=1)
    largest = float(wealth_B.max())  # subtracted, because `exp` of it could overflow
    return largest if math.isinf(largest) else largest + math.log(float(np.exp(wealth_B - largest).mean()))


def _surely_above(gain_G: NDArray[np.float64], wanted: float) -> float:
    """Return the largest margin that the mean gain surely exceeds, to a thousandth of a nat."""
    # The e-value falls as the margin grows, so bisection finds the largest margin.
    low, high = -_WIDEST, _WIDEST
    while high - low > 1e-3:
        middle = (low + high) / 2
        if log_e_value(gain_G, middle) >= wanted:
            low = middle
        else:
            high = middle
    return low


def merged(tokens_D: NDArray[np.int64], least: int = GROUP_TOKENS) -> NDArray[np.int64]:
    """Merge neighbouring documents into groups of at least `least` targets.

    The remainder joins the last group. If all documents together have fewer targets, they form one group.

    Returns:
        The group of each document, int64 [D].

    Example:
        >>> merged(np.array([20, 20, 40, 5]), least=32).tolist()
        [0, 0, 1, 1]
    """
    group_D = np.zeros(len(tokens_D), dtype=np.int64)
    group = have = 0
    for place, tokens in enumerate(tokens_D.tolist()):
        if tokens and have >= least and int(tokens_D[place:].sum()) >= least:
            group, have = group + 1, 0
        group_D[place] = group
        have += tokens
    return group_D
