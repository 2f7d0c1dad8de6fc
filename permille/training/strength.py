"""The strength of a trained state: how many eighths of it are kept (FORMAT 7.6).

    s' = rne(s * j / 8)        j = 8 (the trained state) ... 1, rne: to the nearest integer, ties to even

Weights between the base and the trained ones give up a little of what was learned and avoid most of the
damage to general text (Wortsman et al., "Robust fine-tuning of zero-shot models", arXiv 2109.01903). Here
the weights are on the lattice, so the product is exact: a device and a service that replays its log get the
same state.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError

EIGHTHS = 8
KEEP_GENERAL = 0.1
"""How much the loss on general text may rise by default, nats a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strength:
    """The strength that was chosen.

    Attributes:
        eighths: of the trained state that are kept, 1 to 8; 0: even one raises the loss by too much.
        rise: of the general loss at that strength, or at one eighth where that is too much.
    """

    eighths: int
    rise: float


def scaled(s_K: NDArray[np.int64], eighths: int) -> NDArray[np.int64]:
    """Return the state at a strength, int64 [k], in integers alone.

        scaled(np.array([12, -4, 3]), 4)  # 6, -2, 2: 1.5 is a tie, and 2 is even

    Args:
        s_K: within 2**53, so that eight times it are exact.
        eighths: 1 to 8.

    Raises:
        InputError: another number of eighths.
    """
    if not 1 <= eighths <= EIGHTHS:
        raise InputError(f"expected a strength of 1 to {EIGHTHS} eighths, got {eighths}")
    product_K = s_K * np.int64(eighths)
    floor_K, rest_K = product_K >> 3, product_K & 7
    up_K = (rest_K > 4) | ((rest_K == 4) & (floor_K & 1 == 1))
    result_K: NDArray[np.int64] = floor_K + up_K
    return result_K


def choose_strength(rise_of: Callable[[int], float], bound: float) -> Strength:
    """Find the largest strength whose rise of the general loss is within a bound.

        choose_strength(lambda eighths: rise(engine, values_at(eighths), reference), 0.1)

    Args:
        rise_of: measures a strength in eighths, nats a token; called from 8 downwards, until one is within.
        bound: nats a token. A rise that is not finite is never within it.
    """
    rise = 0.0
    for eighths in range(EIGHTHS, 0, -1):
        rise = rise_of(eighths)
        if rise <= bound:
            return Strength(eighths=eighths, rise=rise)
    return Strength(eighths=0, rise=rise)
