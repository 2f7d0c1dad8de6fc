"""Exact discrete Gaussian noise, drawn with integers only, so that no float is rounded.

The probability of an integer x is proportional to `exp(-x**2 / (2 variance))`. The sampler is that
of Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy" (2020), algorithms
1 to 3. The library OpenDP (47 MB) has the same sampler, and a test compares both.

The time of a draw depends on its value. Do not use the sampler where others can measure that time.
"""

import secrets
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

# A function that returns a uniform integer from 0 to its argument minus 1.
RandBelow = Callable[[int], int]


def draw_noise(count: int, variance: Fraction, randbelow: RandBelow = secrets.randbelow) -> NDArray[np.int64]:
    """Draw `count` independent integers, int64 [count].

    Args:
        variance: the parameter sigma**2, above zero and at most 2**100. The true variance is
            slightly smaller.
        randbelow: the source of randomness, which tests replace.
    """
    scale = int(variance**0.5) + 1  # any positive integer is correct, and one near sigma is fast
    a, b = variance.numerator, variance.denominator
    divisor = 2 * a * b * scale * scale
    drawn: list[int] = []
    while len(drawn) < count:
        candidate = _laplace(scale, randbelow)
        excess = abs(candidate) * scale * b - a
        if _flip_exp(excess * excess, divisor, randbelow):
            drawn.append(candidate)
    return np.array(drawn, dtype=np.int64)


def _laplace(scale: int, randbelow: RandBelow) -> int:
    """Draw an integer with probability proportional to `exp(-abs(x) / scale)` (algorithm 2)."""
    while True:
        low = randbelow(scale)
        if not _flip_exp(low, scale, randbelow):
            continue
        high = 0
        while _flip_exp(1, 1, randbelow):
            high += 1
        size = low + scale * high
        negative = randbelow(2)
        if size or not negative:  # accept zero with one sign only, or it would be twice as likely
            return -size if negative else size


def _flip_exp(numerator: int, denominator: int, randbelow: RandBelow) -> bool:
    """Return True with probability `exp(-numerator / denominator)` (algorithm 1), for a fraction >= 0."""
    while numerator > denominator:
        if not _flip_exp(1, 1, randbelow):
            return False
        numerator -= denominator
    tries = 1
    while randbelow(denominator * tries) < numerator:
        tries += 1
    return tries % 2 == 1
