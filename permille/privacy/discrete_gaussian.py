"""Draw discrete Gaussian noise exactly: with integers alone, no float is rounded anywhere.

The probability of an integer x is proportional to `exp(-x**2 / (2 variance))`. The sampler is that of
Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy" (2020), algorithms 1 to 3.
OpenDP has the same in Rust (47 MB); a test compares the two. How long a draw takes depends on what it draws:
it is not for a place where others time it.
"""

import secrets
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

# A uniform integer from 0 to below its argument.
RandBelow = Callable[[int], int]


def draw_noise(count: int, variance: Fraction, randbelow: RandBelow = secrets.randbelow) -> NDArray[np.int64]:
    """Draw `count` independent integers, int64 [count].

    Args:
        variance: the parameter sigma**2 above zero, within 2**100; the variance itself is a trifle smaller.
        randbelow: where the randomness comes from: the operating system's, except in tests.
    """
    scale = int(variance**0.5) + 1  # any whole number is right, one near sigma is fast
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
    """An integer with probability proportional to `exp(-abs(x) / scale)`."""
    while True:
        low = randbelow(scale)
        if not _flip_exp(low, scale, randbelow):
            continue
        high = 0
        while _flip_exp(1, 1, randbelow):
            high += 1
        size = low + scale * high
        negative = randbelow(2)
        if size or not negative:  # else zero would count twice
            return -size if negative else size


def _flip_exp(numerator: int, denominator: int, randbelow: RandBelow) -> bool:
    """True with probability `exp(-numerator / denominator)`, whatever non-negative fraction that is."""
    while numerator > denominator:
        if not _flip_exp(1, 1, randbelow):
            return False
        numerator -= denominator
    tries = 1
    while randbelow(denominator * tries) < numerator:
        tries += 1
    return tries % 2 == 1
