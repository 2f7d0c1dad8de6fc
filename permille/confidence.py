"""Exact confidence bounds: for a share by the binomial distribution, and for a mean by Student's t.

Both distributions are computed from the regularized incomplete beta function. scipy has this function,
but it is too large for the API and for devices.
"""

import math
from collections.abc import Callable
from typing import Final

# Lentz's method replaces a divisor of 0 by this.
_TINY: Final = 1e-300
_PRECISION: Final = 1e-14
_TERMS: Final = 10_000
# How often a bisection halves its range. This is more than the 53 bits of a float64.
_HALVINGS: Final = 60


def at_least(count: int, n: int, share: float) -> float:
    """Return the probability of at least `count` successes in `n` trials, each with probability `share`.

    Example:
        >>> round(at_least(2, 2, 0.5), 4)
        0.25
    """
    return 1.0 if count <= 0 else beta_share(count, n - count + 1, share)


def above(t: float, free: int) -> float:
    """Return the probability that Student's t with `free` degrees of freedom exceeds `t`."""
    tail = beta_share(free / 2, 0.5, free / (free + t * t)) / 2
    return tail if t >= 0 else 1 - tail


def lower_share(count: int, n: int, alpha: float) -> float:
    """Return the exact lower bound of a share (Clopper and Pearson), with error probability `alpha`.

    Example:
        >>> round(lower_share(8, 80, 0.001), 3)  # eight failures of eighty: surely more than 2 %
        0.025
    """
    if count == 0:
        return 0.0
    return _crossing(lambda share: at_least(count, n, share) - alpha, 0.0, 1.0)


def lower_mean(mean: float, deviation: float, n: int, alpha: float) -> float:
    """Return the lower bound of a mean of `n` values by Student's t, or minus infinity for fewer than
    two.
    """
    if n < 2:
        return -math.inf
    # The bound of 1e6 is far above the t of every error probability in use.
    t = _crossing(lambda value: alpha - above(value, n - 1), 0.0, 1e6)
    return mean - t * deviation / math.sqrt(n)


def _crossing(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of an increasing function, by bisection. The result is never above the zero."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return low


def beta_share(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b) by its continued fraction.

    The fraction is NIST Handbook 8.17.22, evaluated by Lentz's method.

    Example:
        >>> round(beta_share(2.0, 3.0, 0.5), 4)
        0.6875
    """
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        # For larger x, the fraction converges slowly. Use I_x(a, b) = 1 - I_1-x(b, a) (NIST 8.17.4).
        return 1 - beta_share(b, a, 1 - x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1 / _safe(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, _TERMS):
        before = fraction
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / _safe(1 + term * d), _safe(1 + term / c)
            fraction *= d * c
        if abs(fraction - before) <= _PRECISION * abs(fraction):
            break
    return math.exp(scale) * fraction / a


def _safe(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
