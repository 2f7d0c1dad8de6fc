"""Rotary position embeddings: the frequencies of a config (RoFormer, equation 15, and later scalings).

    x1' = x1 cos(p f) - x2 sin(p f),   x2' = x2 cos(p f) + x1 sin(p f)

Here x1 and x2 are the two halves of the rotated part of a head, p is the position and f are the frequencies.
Frequencies are computed in float64 and rounded once. Angles are float32 products, as in transformers.

Known types: default, linear, dynamic, llama3 (Llama 3.1), yarn (YaRN, sections 3.2 and 3.4), longrope
(LongRoPE, section 3.2). "dynamic" changes nothing up to the model's last position, and no sequence is
longer. Beyond the original context (`original_max_position_embeddings`), "longrope" has other frequencies,
and "yarn" with `llama_4_scaling_beta` (Ministral 3) scales scores. So these two are supported only within the
original context.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.models.settings import positive, unsupported

_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "longrope": frozenset(
        {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"}
    ),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "llama_4_scaling_beta",
            "max_position_embeddings",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        }
    ),
}
_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rope:
    """Frequencies of one kind of layer.

    Attributes:
        frequency_E: float32 [rotated / 2].
        scaling: the factor of cosine and sine.
        longest: the length of the longest sequence for which the frequencies hold, or None without a limit.
    """

    frequency_E: NDArray[np.float32]
    scaling: float
    longest: int | None = None

    @property
    def rotated(self) -> int:
        """Return the number of rotated dimensions of a head. They are the first dimensions of the head."""
        return 2 * len(self.frequency_E)

    def tables(self, position_T: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return cosine and sine at some positions, float32 [T, rotated / 2]."""
        angle_TE = position_T.astype(np.float32)[:, None] * self.frequency_E
        scaling = np.float32(self.scaling)
        return np.cos(angle_TE) * scaling, np.sin(angle_TE) * scaling


def rope_of(parameters: Mapping[str, Any], *, head: int, positions: int) -> Rope:
    """Return the rotary frequencies that a config's `rope_parameters` describe.

    >>> rope_of({"rope_theta": 1e4}, head=4, positions=8).frequency_E.round(2).tolist()
    [1.0, 0.009999999776482582]

    Args:
        parameters: `rope_parameters` of a config, with `rope_theta`.
        head: the width of a head.
        positions: the model's `max_position_embeddings`.

    Raises:
        InputError: a type or key is unknown, or a number is out of range.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise unsupported(f"a rope type of {', '.join(_KEYS)}", kind)
    unknown = sorted(given.keys() - _KEYS[kind] - _ALWAYS)
    if unknown:
        raise unsupported(f"the keys of rope type {kind}", unknown)
    theta = positive("rope_theta", given.get("rope_theta"))
    part = positive("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    # As in transformers, the number of rotated dimensions is rounded down.
    width = int(head * min(part, 2.0))  # a width above `head` is refused below
    if width % 2 or not 2 <= width <= head:
        raise unsupported(f"an even number from 2 to {head} of rotated numbers in a head", width)
    exponent_E = np.arange(0, width, 2, dtype=np.float64) / width
    frequency_E, scaling, longest = theta**-exponent_E, 1.0, None
    if kind == "linear":
        frequency_E = frequency_E / positive("factor", given.get("factor"))
    elif kind == "llama3":
        frequency_E = _llama3(frequency_E, given, positions)
    elif kind == "yarn":
        frequency_E, scaling = _yarn(frequency_E, given, theta, width, positions)
        if "llama_4_scaling_beta" in given:  # beyond the original context, it would also scale scores
            longest = int(_context(given, positions))
    elif kind == "longrope":
        longest = int(_context(given, positions))
        frequency_E = frequency_E / _short_factors(given, width // 2)
        scaling = _long_scaling(given, positions, longest)
    # An overflow becomes infinity, which is refused below.
    with np.errstate(over="ignore"):
        rounded_E = frequency_E.astype(np.float32)
    if not np.isfinite(rounded_E).all():
        raise unsupported("rope_theta and its scaling to give frequencies that float32 holds", dict(given))
    return Rope(frequency_E=rounded_E, scaling=scaling, longest=longest)


def _context(given: Mapping[str, Any], positions: int) -> float:
    key = "original_max_position_embeddings"
    context = positive(key, given.get(key, positions))
    if context < 1 or context != int(context):
        raise unsupported(f"{key} to be a whole number of at least 1", context)
    return context


def _short_factors(given: Mapping[str, Any], count: int) -> NDArray[np.float64]:
    factors = given.get("short_factor")
    if not isinstance(factors, list) or len(factors) != count:
        raise unsupported(f"short_factor of rope type longrope to be {count} numbers", factors)
    return np.array([positive("short_factor", factor) for factor in factors], np.float64)


def _long_scaling(given: Mapping[str, Any], positions: int, context: int) -> float:
    if "attention_factor" in given:
        return positive("attention_factor", given["attention_factor"])
    factor = positive("factor", given.get("factor", positions / context))
    if factor <= 1:
        return 1.0
    # log(1) = 0 would be the divisor below.
    if context == 1:
        raise unsupported("original_max_position_embeddings above 1 for rope type longrope", context)
    # The formula is that of transformers.
    return math.sqrt(1 + math.log(factor) / math.log(context))


def _llama3(
    frequency_E: NDArray[np.float64], given: Mapping[str, Any], positions: int
) -> NDArray[np.float64]:
    factor = positive("factor", given.get("factor"))
    low = positive("low_freq_factor", given.get("low_freq_factor"))
    high = positive("high_freq_factor", given.get("high_freq_factor"))
    if low == high:
        raise unsupported("low_freq_factor and high_freq_factor to differ", low)
    context = _context(given, positions)
    wavelength_E = 2 * math.pi / frequency_E
    # Long waves are stretched by `factor`, short waves keep their length, and other waves are interpolated.
    slow_E = np.where(wavelength_E > context / low, frequency_E / factor, frequency_E)
    smooth_E = (context / wavelength_E - low) / (high - low)
    between_E = (1 - smooth_E) * slow_E / factor + smooth_E * slow_E
    medium_E = ~(wavelength_E < context / high) & ~(wavelength_E > context / low)
    return np.where(medium_E, between_E, slow_E)


def _yarn(
    frequency_E: NDArray[np.float64], given: Mapping[str, Any], theta: float, width: int, positions: int
) -> tuple[NDArray[np.float64], float]:
    context = _context(given, positions)
    factor = positive("factor", given.get("factor", positive("max_position_embeddings", positions) / context))
    if theta == 1:
        raise unsupported("rope_theta other than 1 for rope type yarn", theta)
    # As in transformers, 0 counts as absent.
    fast = positive("beta_fast", given.get("beta_fast") or 32)
    slow = positive("beta_slow", given.get("beta_slow") or 1)

    # YaRN, section 3.2: the dimension that makes this many rotations within the original context.
    def dimension(rotations: float) -> float:
        return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    # As in transformers: a ramp of width 0 would divide by 0.
    high = high + 0.001 if low == high else high
    ramp_E = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    return frequency_E / factor * ramp_E + frequency_E * (1 - ramp_E), _yarn_scaling(given, factor)


def _yarn_scaling(given: Mapping[str, Any], factor: float) -> float:
    if "attention_factor" in given:
        return positive("attention_factor", given["attention_factor"])

    def scale(weight: float) -> float:
        # YaRN, section 3.4.
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, all_weight = given.get("mscale"), given.get("mscale_all_dim")
    if weight and all_weight:
        return scale(positive("mscale", weight)) / scale(positive("mscale_all_dim", all_weight))
    return scale(1.0)
