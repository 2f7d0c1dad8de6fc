"""Rounds of a federation with privacy: the bound on each device, and the noise in sums (FORMAT 13.6,
13.7).

Shapes: K = steps of a round, q = queries of a device, V = K q + 1 integers of a vector. The last integer
is the gain.
"""

import math
import secrets
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille_rounds.contribution import Contribution
from permille_rounds.definition import GAIN_NATS, Definition
from permille_rounds.masked import Masked, vector_size
from permille_rounds.privacy.discrete_gaussian import RandBelow, draw_noise
from permille_rounds.privacy.seals import signed_sum
from permille_rounds.rounds import Round, check_together, clipped, divided

_TAIL: Final = 8.0  # the noise's norm exceeds sigma * (sqrt(V) + 8) less than once in 10**13 draws


def vector_of(contribution: Contribution) -> NDArray[np.int64]:
    """Return a device's integers as one vector within the clip C, int64 [V]. Missing steps are zeros."""
    rules = contribution.definition
    if rules.clip is None:
        raise InputError("This federation has no clip.")
    vector_V = np.zeros(vector_size(rules), dtype=np.int64)
    # FORMAT 13.6: the gain is within C / 10, so coefficients within sqrt(0.98) C keep the vector within C.
    c_TQ = clipped(contribution.c_TQ, math.isqrt(98 * rules.clip * rules.clip // 100))
    vector_V[: c_TQ.size] = c_TQ.reshape(-1)
    vector_V[-1] = contribution.gain
    return vector_V


def draw_round_noise(definition: Definition, randbelow: RandBelow = secrets.randbelow) -> NDArray[np.int64]:
    """Draw fresh noise for every integer of a round's sum, int64 [V].

    Never draw noise again for a sum that anyone has seen. The mean of two noised sums has less noise
    than each of them.
    """
    if definition.privacy is None or definition.clip is None:
        raise InputError("This federation has no privacy, so its sums have no noise.")
    return draw_noise(vector_size(definition), definition.privacy.variance(definition.clip), randbelow)


def noised_sum(
    definition: Definition,
    number: int,
    contributions: Sequence[Contribution],
    noise_V: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the sum of the devices' vectors and the noise, int64 [V].

    No other number that depends on the vectors may leave the service.

    Raises:
        InputError: the contributions do not belong together.
    """
    check_together(definition, number, contributions)
    total_V = noise_V.copy()
    for each in contributions:
        total_V += vector_of(each)
    return total_V


def unmasked_sum(
    definition: Definition, number: int, masked: Sequence[Masked], answer_V: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Return the sum of the devices' vectors and the keeper's noise, int64 [V].

    Args:
        answer_V: the keeper's answer for exactly these devices.

    Raises:
        InputError: the contributions do not belong together.
    """
    check_together(definition, number, masked)
    # Add unsigned integers, because masks cancel out only modulo 2**32.
    total_V = np.zeros(vector_size(definition), dtype=np.uint32)
    for each in masked:
        total_V += each.masked_V
    return signed_sum(total_V - answer_V)


def round_of_sum(definition: Definition, number: int, devices: int, sum_V: NDArray[np.int64]) -> Round:
    """Make a round from a noised sum. Every device counts at every step.

    Raises:
        PackageError: `round-limit`: a coefficient exceeds the range of a log, or the sum is longer than
            the vectors and the noise can make it. In the second case, the keeper or a device lies.
    """
    _check_possible(definition, devices, sum_V)
    # Other weights would reveal how many devices stopped early, so all devices count at every step.
    weight_K = np.full(definition.steps, devices, dtype=np.int64)
    sum_KJ = sum_V[:-1].reshape(definition.steps, definition.log.queries)
    return divided(definition, number, sum_KJ, weight_K, weight_K)


def _check_possible(definition: Definition, devices: int, sum_V: NDArray[np.int64]) -> None:
    """Refuse a sum whose norm exceeds the clips of its devices and the noise together.

    A false sum within this bound goes unnoticed.
    """
    if definition.privacy is None or definition.clip is None:
        raise InputError("This federation has no privacy, so its sums have no noise.")
    sigma = math.sqrt(definition.privacy.variance(definition.clip))
    longest = devices * definition.clip + sigma * (math.sqrt(len(sum_V)) + _TAIL)
    length = float(np.linalg.norm(sum_V.astype(np.float64)))
    if length > longest:
        raise PackageError(
            "round-limit",
            f"The sum has norm {length:.0f}, but {devices} devices and the noise give at most {longest:.0f}. "
            "The keeper or a device lies.",
        )


def noised_gains(definition: Definition, devices: int, gain_sum: int) -> tuple[float, float]:
    """Return the mean of the devices' gains and its standard error in nats per token."""
    if definition.privacy is None or definition.clip is None:
        raise InputError("This federation has no privacy, so its sums have no noise.")
    # Only the sum of the gains is known, not their variance. A gain is from -GAIN_NATS to GAIN_NATS, so its
    # variance is at most the square of GAIN_NATS.
    unit = GAIN_NATS / definition.gain_bound
    noise = unit * definition.privacy.noise_multiplier * definition.clip / devices
    return unit * gain_sum / devices, math.hypot(noise, GAIN_NATS / math.sqrt(devices))
