"""Strength of a trained state: the number of eighths of it that are kept (FORMAT 7.6).

    s' = rne(s * j / 8)        # rne: to the nearest integer, ties to even

j is 8 for the whole trained state and 1 for the smallest part of it.

Interpolating between base and trained weights loses a little of what was learned and avoids most
of the damage to general text (Wortsman et al., "Robust fine-tuning of zero-shot models", arXiv
2109.01903). Here the state is a vector of integers, so the result is exact. If a service replays a
device's log, it gets the same state as the device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError

EIGHTHS = 8
KEEP_GENERAL = 0.1
"""Default bound on the rise of the loss on general text, in nats per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strength:
    """The strength that was chosen.

    Attributes:
        eighths: the number of eighths to keep, 1 to 8. 0 means that one eighth already raises the
            general loss by too much.
        rise: the rise of the general loss at that strength, in nats per token. If `eighths` is 0,
            the rise at one eighth.
        fault: what the next larger strength would do to an answer. "" if it would raise the general
            loss by too much, or if there is none.
    """

    eighths: int
    rise: float
    fault: str = ""


def strength_beside_memory(eighths: int, share: float) -> int:
    """Return the strength of a state beside a memory of its own text.

    The state has learned what the memory already says, and both together exaggerate it. So the state is
    halved if the memory holds the whole text, and stays as it is if the memory holds nothing of the text
    (docs/adr/0045).

    Args:
        eighths: the strength of the state alone, 1 to 8.
        share: the share of the text that the memory has, 0 to 1.

    Example:
        >>> [strength_beside_memory(8, share) for share in (1, 0.5, 0)], strength_beside_memory(1, 1)
        ([4, 6, 8], 1)
    """
    return math.ceil(eighths * (1 - share / 2))


def scaled(s_K: NDArray[np.int64], eighths: int) -> NDArray[np.int64]:
    """Return the state at a strength, as int64 [K], with integer arithmetic only.

        scaled(np.array([12, -4, 3]), 4)  # 6, -2, 2: 1.5 is a tie, and 2 is even

    Args:
        s_K: the state. States stay within 2**53 (FORMAT 7.3), so eight times a state fits into int64.
        eighths: the strength, 1 to 8.

    Raises:
        InputError: `eighths` is out of range.
    """
    if not 1 <= eighths <= EIGHTHS:
        raise InputError(f"The strength must be 1 to {EIGHTHS} eighths, not {eighths}.")
    product_K = s_K * np.int64(eighths)
    # The shift rounds down, also below 0, so the remainder is 0 to 7.
    floor_K, rest_K = product_K >> 3, product_K & 7
    # Round ties to even: if the floor is odd, the next integer is even.
    up_K = (rest_K > 4) | ((rest_K == 4) & (floor_K & 1 == 1))
    result_K: NDArray[np.int64] = floor_K + up_K
    return result_K


def choose_strength(
    rise_of: Callable[[int], float], bound: float, fault_at: Callable[[int], str] = lambda _: ""
) -> Strength:
    """Find the largest strength that keeps the general loss within a bound, and the base's answers.

        choose_strength(lambda eighths: rise(engine, values_at(eighths), reference), 0.1)

    Args:
        rise_of: returns the rise at a number of eighths, in nats per token. It is called with 8, 7, ...
            until a rise is within the bound.
        bound: the largest rise to accept, in nats per token. A rise that is NaN or infinite is never
            accepted.
        fault_at: returns what is wrong with the answers at a number of eighths, or "". It is called only
            if the rise is within the bound, because answers take longer than losses.
    """
    rise, fault = 0.0, ""
    for eighths in range(EIGHTHS, 0, -1):
        rise = rise_of(eighths)
        # NaN fails this comparison.
        accepted = rise <= bound
        found = fault_at(eighths) if accepted else ""
        if accepted and not found:
            return Strength(eighths=eighths, rise=rise, fault=fault)
        fault = found
    return Strength(eighths=0, rise=rise, fault=fault)
