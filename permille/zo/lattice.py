"""The trained state: one integer for each masked weight, on a lattice with a power of two as unit (FORMAT 7).

`w = fp32(float64(w_base) + 2**e * s)`. An update is `s += c * z` with integers, so updates are exact and
associative: they can be applied, split, merged and undone in any order. Nothing saturates. An update
that could move an integer of the state beyond 2**53 is refused.

Shapes: K = masked weights of all tensors, Q = queries.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_output
from permille.native.library import load

STATE_LIMIT = 1 << 53
"""Bound on sum |c| of a log, and therefore on |s|. Within this bound, float64(s) is exact."""

# The limit of a coefficient in a log (FORMAT 8.2).
MAX_COEFFICIENT = (1 << 31) - 1
# 2**-149 is the smallest positive float32.
MIN_STEP_UNIT_EXPONENT = -149
MAX_STEP_UNIT_EXPONENT = 64

_STATE_DOMAIN = b"permille-state-1\0"
# The root mean square that coefficients should have, so that a projected gradient keeps some ten bits. With
# more bits, logs would only be longer. With fewer, rounding would add noise.
_COEFFICIENT_RMS = 1024


def values(
    w_base_K: NDArray[np.float32], s_K: NDArray[np.int64], step_unit_exponent: int
) -> NDArray[np.float32]:
    """Return the weights of a state: `fp32(float64(w_base) + 2**e * s)`, float32 [K] (FORMAT 7.2).

    For example, with a unit of 2**-2:

        >>> values(np.array([1.0, 1.0], np.float32), np.array([2, -1]), -2).tolist()
        [1.5, 0.75]
    """
    return _exact(w_base_K, s_K, step_unit_exponent).astype(np.float32)


def perturbed(
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step_unit_exponent: int,
    z_K: NDArray[np.int8],
    scale: float,
) -> NDArray[np.float32]:
    """Return the weights of a state moved by `scale * z`, rounded to float32 once; float32 [K].

    Each call computes the weights from the state, so nothing needs to be restored, and rounding errors do not
    accumulate.

    Args:
        scale: `epsilon / sigma` or its negative.
    """
    w_K, state_K, z_K = _checked(w_base_K, s_K, z_K)
    library = load()
    if library is not None:
        out_K = np.empty(w_K.shape, dtype=np.float32)
        numbers = (_unit(step_unit_exponent), np.array(scale, dtype=np.float64))
        library.call("perturbed", w_K, state_K, *numbers, z_K, len(z_K), out_K)
        return out_K
    # Without the kernels, numpy does the same operations. Tests check that both give the same bits.
    moved_K = _exact(w_K, state_K, step_unit_exponent)
    moved_K += scale * z_K.astype(np.float64)
    return moved_K.astype(np.float32)


def perturbed_pairs(
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step_unit_exponent: int,
    z_QK: NDArray[np.int8],
    scale: float,
) -> NDArray[np.float32]:
    """Return the weights moved along +z_0, -z_0, +z_1, ..., with the bits that `perturbed` gives: [2 Q, K].

    One pass over the state computes all rows.

    Raises:
        InputError: the shapes do not match.
    """
    w_K, state_K, z_QK = _checked(w_base_K, s_K, z_QK)
    out_VK = np.empty((2 * len(z_QK), len(w_K)), dtype=np.float32)
    library = load()
    if library is not None:
        numbers = (_unit(step_unit_exponent), np.array(scale, dtype=np.float64))
        library.call("perturbed_pairs", w_K, state_K, *numbers, z_QK, *z_QK.shape, out_VK)
        return out_VK
    exact_K = _exact(w_K, state_K, step_unit_exponent)
    for query, z_K in enumerate(z_QK):
        move_K = scale * z_K.astype(np.float64)
        out_VK[2 * query] = exact_K + move_K
        out_VK[2 * query + 1] = exact_K - move_K
    return out_VK


def add_scaled(s_K: NDArray[np.int64], c: int, z_K: NDArray[np.int8]) -> None:
    """Set `s += c * z` in place. The caller checks that no sum exceeds `STATE_LIMIT`.

    Raises:
        InputError: an array has another type or shape.
    """
    check_output("the state", s_K, np.int64, (None,))
    z_K = np.ascontiguousarray(z_K)
    check_array("z", z_K, np.int8, s_K.shape)
    library = load()
    if library is not None:
        library.call("add_scaled", s_K, c, z_K, len(z_K))
    else:
        s_K += c * z_K.astype(np.int64)


def coefficient(
    *, learning_rate: float, projected_grad: float, queries: int, sigma: float, step_unit_exponent: int
) -> int:
    """Return the integer factor of `z`: `c = rint(-lr * projected_grad / (q * sigma * 2**e))`.

    Here q is `queries`, and e is `step_unit_exponent`. The quotient is computed in float64 and rounded half
    to even. For example, with a unit of 2**-10:

        >>> coefficient(
        ...     learning_rate=0.5, projected_grad=-1.0, queries=1, sigma=1.0, step_unit_exponent=-10
        ... )
        512

    Raises:
        InputError: the quotient is not finite.
    """
    unit = math.ldexp(1.0, step_unit_exponent)
    quotient = -learning_rate * projected_grad / (queries * sigma * unit)
    if not math.isfinite(quotient):
        raise InputError(
            f"expected a finite coefficient, got {quotient} from projected_grad {projected_grad}"
        )
    # Python's `round` is half to even, as the format requires.
    return round(quotient)


def step_unit_exponent_for(learning_rate: float, g_rms: float, queries: int, sigma: float = 1.0) -> int:
    """Return the exponent of the power of two nearest `lr * g_rms / (1024 q sigma)`.

    With this unit, coefficients have a root mean square of some 1024.

    Args:
        learning_rate: lr.
        g_rms: the root mean square of the projected gradients.
        queries: q.
        sigma: the root mean square of z (FORMAT 6).

    Raises:
        InputError: the unit is outside of the format's range, or not a number.
    """
    unit = learning_rate * g_rms / (_COEFFICIENT_RMS * queries * sigma)
    # NaN fails the comparison, too.
    if not 2.0**MIN_STEP_UNIT_EXPONENT <= unit <= 2.0**MAX_STEP_UNIT_EXPONENT:
        raise InputError(
            f"A learning rate of {learning_rate} and gradients of size {g_rms} give a step unit of {unit}. "
            f"It must be from 2**{MIN_STEP_UNIT_EXPONENT} to 2**{MAX_STEP_UNIT_EXPONENT}."
        )
    return round(math.log2(unit))


def state_digest(s_K: NDArray[np.int64], *, mask_digest: str, step_unit_exponent: int) -> str:
    """Return the digest of a state: sha256 of domain, mask digest, exponent and integers (FORMAT 10)."""
    digest = hashlib.sha256(_STATE_DOMAIN)
    # The same integers on another mask or unit are other weights, so both are part of the digest.
    digest.update(mask_digest.encode("ascii") + b"\0")
    digest.update(step_unit_exponent.to_bytes(4, "little", signed=True))
    digest.update(np.ascontiguousarray(s_K, dtype="<i8").data)
    return f"sha256:{digest.hexdigest()}"


def _exact(
    w_base_K: NDArray[np.float32], s_K: NDArray[np.int64], step_unit_exponent: int
) -> NDArray[np.float64]:
    if w_base_K.shape != s_K.shape:
        raise InputError(f"expected a state of shape {w_base_K.shape}, got {s_K.shape}")
    # Keep this order of operations, because FORMAT 7.2 fixes the bits.
    exact_K: NDArray[np.float64] = s_K.astype(np.float64)
    exact_K *= math.ldexp(1.0, step_unit_exponent)
    exact_K += w_base_K
    return exact_K


def _checked(
    w_base_K: NDArray[np.float32], s_K: NDArray[np.int64], z: NDArray[np.int8]
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int8]]:
    """Make the arrays contiguous for the kernels, and check their types and shapes."""
    w_K, state_K, z = np.ascontiguousarray(w_base_K), np.ascontiguousarray(s_K), np.ascontiguousarray(z)
    check_array("base weights", w_K, np.float32, (None,))
    check_array("the state", state_K, np.int64, w_K.shape)
    check_array("z", z, np.int8, (*z.shape[:-1], len(w_K)))
    return w_K, state_K, z


def _unit(step_unit_exponent: int) -> NDArray[np.float64]:
    return np.array(math.ldexp(1.0, step_unit_exponent))
