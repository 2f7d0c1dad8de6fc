"""Rounds of a federation with privacy: what bounds a device, and what noise its sums get (FORMAT 13.6, 13.7).

Shapes: K = steps of a round, q = a device's queries, V = K q + 1 integers of a vector, the gain last.
"""

import math
import secrets
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille.federation.contribution import Contribution
from permille.federation.definition import GAIN_NATS, Definition
from permille.federation.masked import Masked, vector_size
from permille.federation.rounds import Round, check_together, clipped, divided
from permille.privacy.discrete_gaussian import RandBelow, draw_noise
from permille.privacy.masks import signed_sum

_TAIL: Final = 8.0


def vector_of(contribution: Contribution) -> NDArray[np.int64]:
    """A device's integers as one vector within the clip C, int64 [V]; steps that it did not do are zeros.

    The coefficients are within `isqrt(98 C**2 / 100)` and the gain within `C / 10`.
    """
    rules = contribution.definition
    if rules.clip is None:
        raise InputError("expected a federation with a clip")
    vector_V = np.zeros(vector_size(rules), dtype=np.int64)
    c_TQ = clipped(contribution.c_TQ, math.isqrt(98 * rules.clip * rules.clip // 100))
    vector_V[: c_TQ.size] = c_TQ.reshape(-1)
    vector_V[-1] = contribution.gain
    return vector_V


def draw_round_noise(definition: Definition, randbelow: RandBelow = secrets.randbelow) -> NDArray[np.int64]:
    """Fresh noise for every integer of a round's sum, int64 [V]; never twice for a sum that was seen."""
    if definition.privacy is None or definition.clip is None:
        raise InputError("expected a federation with privacy")
    return draw_noise(vector_size(definition), definition.privacy.variance(definition.clip), randbelow)


def noised_sum(
    definition: Definition,
    number: int,
    contributions: Sequence[Contribution],
    noise_V: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The sum of the devices' vectors and noise, int64 [V]: all that may leave the service.

    Raises:
        InputError: contributions that do not belong together.
    """
    check_together(definition, number, contributions)
    total_V = noise_V.copy()
    for each in contributions:
        total_V += vector_of(each)
    return total_V


def unmasked_sum(
    definition: Definition, number: int, masked: Sequence[Masked], answer_V: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """The sum of the devices' vectors and the keeper's noise, int64 [V].

    Args:
        answer_V: of the keeper for exactly these devices: the sum of their masks less noise.

    Raises:
        InputError: contributions that do not belong together.
    """
    check_together(definition, number, masked)
    total_V = np.zeros(vector_size(definition), dtype=np.uint32)
    for each in masked:
        total_V += each.masked_V
    return signed_sum(total_V - answer_V)


def round_of_sum(definition: Definition, number: int, devices: int, sum_V: NDArray[np.int64]) -> Round:
    """The round that a noised sum makes; every device counts at every step, for who stopped early is hidden.

    Raises:
        PackageError: `round-limit`: a coefficient leaves the range of a log, or no such devices and noise
            make this sum, so that the keeper or a device lies.
    """
    _check_possible(definition, devices, sum_V)
    weight_K = np.full(definition.steps, devices, dtype=np.int64)
    sum_KJ = sum_V[:-1].reshape(definition.steps, definition.log.queries)
    return divided(definition, number, sum_KJ, weight_K, weight_K)


def _check_possible(definition: Definition, devices: int, sum_V: NDArray[np.int64]) -> None:
    """Refuse a sum that is longer than the clips of its devices and the noise together.

    The noise is within `sigma (sqrt(V) + 8)` but once in 10**13 rounds (concentration of a Gaussian's norm).
    A lie within that is as small as what noise hides.
    """
    if definition.privacy is None or definition.clip is None:
        raise InputError("expected a federation with privacy")
    sigma = math.sqrt(definition.privacy.variance(definition.clip))
    longest = devices * definition.clip + sigma * (math.sqrt(len(sum_V)) + _TAIL)
    length = float(np.linalg.norm(sum_V.astype(np.float64)))
    if length > longest:
        raise PackageError(
            "round-limit",
            f"expected a sum of norm {longest:.0f} at most of {devices} devices and noise, got {length:.0f}: "
            "the keeper or a device lies",
        )


def noised_gains(definition: Definition, devices: int, gain_sum: int) -> tuple[float, float]:
    """Mean of the devices' gains and its standard error, in nats per token, from the noised sum alone.

    How much gains differ is not asked: a gain within a bound has at most its square as variance.
    """
    if definition.privacy is None or definition.clip is None:
        raise InputError("expected a federation with privacy")
    unit = GAIN_NATS / definition.gain_bound
    noise = unit * definition.privacy.noise_multiplier * definition.clip / devices
    return unit * gain_sum / devices, math.hypot(noise, GAIN_NATS / math.sqrt(devices))
