"""Privacy accounting by zero-concentrated differential privacy (zCDP).

The vector of a device has norm at most C, the clip. Each integer of the sum gets discrete Gaussian noise
with parameter `(z C)**2`, where z is the noise multiplier. So one participation costs `rho = 1 / (2 z**2)`
in any dimension, and costs add up (Canonne, Kamath, Steinke 2020, theorem 14; Bun, Steinke 2016).

Two data sets are neighbours if they differ in one device, whose vectors are all zeros in one of them. That a
device takes part is public. A service may sample devices, but the cost is not reduced for that.

The library dp-accounting has the same accountant, but it needs scipy and absl. So devices use this formula,
and a test compares both.
"""

import math

# The norm of the devices' mean vector divided by the clip, as assumed before the first round.
MEAN_NORM = 0.5

_HALVINGS = 200


def rho_of(noise_multiplier: float, participations: int) -> float:
    """Return the zCDP cost of this many participations, with noise of `noise_multiplier` times the clip.

    Example:
        >>> rho_of(noise_multiplier=2.0, participations=8)
        1.0
    """
    return participations / (2 * noise_multiplier**2)


def dp_epsilon_of(rho: float, delta: float) -> float:
    """Return the smallest known epsilon for which rho-zCDP implies (epsilon, delta)-differential privacy.

    It is the minimum over alpha > 1 of `rho alpha + log(1 - 1/alpha) - log(delta alpha) / (alpha -
    1)` (Canonne, Kamath, Steinke 2020, corollary 13).

    Example:
        >>> round(dp_epsilon_of(0.5, 1e-6), 2)
        5.22
    """
    # Search over log(alpha - 1). Every alpha gives a valid epsilon, so an inexact search is still safe.
    low, high = math.log(1e-9), math.log(1e9)
    for _ in range(_HALVINGS):
        third = (high - low) / 3
        if _bound(rho, delta, low + third) < _bound(rho, delta, high - third):
            high -= third
        else:
            low += third
    return max(0.0, _bound(rho, delta, (low + high) / 2))


def _bound(rho: float, delta: float, log_beyond: float) -> float:
    beyond = math.exp(log_beyond)
    alpha = 1 + beyond
    return rho * alpha + math.log(beyond / alpha) - math.log(delta * alpha) / beyond


def noise_for(dp_epsilon: float, delta: float, participations: int) -> int:
    """Return the least noise with which `participations` rounds cost at most `dp_epsilon`.

    Returns:
        The standard deviation of the noise in hundredths of the clip, from 1 to 1,000,000. At 1,000,000, the
        rounds may still cost more than `dp_epsilon`.
    """
    # More noise always gives a smaller epsilon, so bisection finds the least noise.
    low, high = 0, 1_000_000
    while high - low > 1:
        middle = (low + high) // 2
        if dp_epsilon_of(rho_of(middle / 100, participations), delta) <= dp_epsilon:
            high = middle
        else:
            low = middle
    return high


def signal_to_noise(devices: int, coefficients: int, noise_multiplier: float) -> float:
    """Predict the norm of the sum of the vectors divided by the norm of the noise.

    It is `m a / (z sqrt(K q))`, with m devices, a = `MEAN_NORM`, noise multiplier z and K q coefficients.
    """
    return devices * MEAN_NORM / (noise_multiplier * math.sqrt(coefficients))
