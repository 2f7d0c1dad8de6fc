"""Account for noise: zero-concentrated differential privacy, and the epsilon that it implies.

A device's vector has norm at most C, and each integer of the sum gets discrete Gaussian noise of parameter
`(z C)**2`: one participation costs `rho = 1 / (2 z**2)`, in any dimension, and participations add (Canonne,
Kamath, Steinke 2020, theorem 14; Bun, Steinke 2016). Neighbours differ in one device, whose vectors of all
rounds are zeros; that it took part is public. Nothing is claimed for being sampled.

dp-accounting has the same accountant; it brings scipy and absl, so that a device computes the formula itself
and a test compares the two.
"""

import math

# Of the mean of the devices' vectors, over the clip: what a prediction assumes before the first
# round.
MEAN_NORM = 0.5

_HALVINGS = 200


def rho_of(noise_multiplier: float, participations: int) -> float:
    """The zCDP cost of so many participations under noise of `z` times the clip."""
    return participations / (2 * noise_multiplier**2)


def dp_epsilon_of(rho: float, delta: float) -> float:
    """The smallest epsilon for which rho-zCDP is shown to be (epsilon, delta)-differentially private.

    The minimum over alpha > 1 of `rho alpha + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1)` (Canonne,
    Kamath, Steinke 2020, corollary 13). Every alpha is a proof, so that a search that stops early only claims
    less privacy than there is.
    """
    low, high = math.log(1e-9), math.log(1e9)  # of alpha - 1
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
    """The least noise, in hundredths of the clip, with which so many rounds cost at most `dp_epsilon`.

    Returns:
        at least 1; a million where even that would not be enough.
    """
    low, high = 0, 1_000_000
    while high - low > 1:
        middle = (low + high) // 2
        if dp_epsilon_of(rho_of(middle / 100, participations), delta) <= dp_epsilon:
            high = middle
        else:
            low = middle
    return high


def signal_to_noise(devices: int, coefficients: int, noise_multiplier: float) -> float:
    """The predicted norm of the sum of the devices' vectors over that of the noise: `m a / (z sqrt(Kq))`."""
    return devices * MEAN_NORM / (noise_multiplier * math.sqrt(coefficients))
