"""The trained state: one integer per masked weight, on a lattice whose unit is a power of two (FORMAT 7).

`w = fp32(float64(w_base) + 2**e * s)`. Updates are `s += c * z` with integer `c` and `z`, so they are exact
and associative: they may be applied, split, merged and undone in any order. Nothing here saturates; what
would leave the range is refused.

Shapes: K = masked weights of all tensors.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_output
from permille.native.library import load

STATE_LIMIT = 1 << 53
"""Bound on sum |c| of a log, and so on |s|: below it float64(s) is exact."""

MAX_COEFFICIENT = (1 << 31) - 1
MIN_STEP_UNIT_EXPONENT = -149
MAX_STEP_UNIT_EXPONENT = 64

_STATE_DOMAIN = b"permille-state-1\0"
_COEFFICIENT_RMS = 1024


def values(
    w_base_K: NDArray[np.float32], s_K: NDArray[np.int64], step_unit_exponent: int
) -> NDArray[np.float32]:
    """Weights of a state: `fp32(float64(w_base) + 2**e * s)`, float32 [k] (FORMAT 7.2)."""
    return _exact(w_base_K, s_K, step_unit_exponent).astype(np.float32)


def perturbed(
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step_unit_exponent: int,
    z_K: NDArray[np.int8],
    scale: float,
) -> NDArray[np.float32]:
    """Weights moved by `scale * z`, `scale = +-epsilon / sigma`, rounded to float32 once; float32 [k].

    Computed from the state each time, so nothing is restored and nothing drifts.
    """
    w_K, state_K, z_K = _checked(w_base_K, s_K, z_K)
    library = load()
    if library is not None:
        out_K = np.empty(w_K.shape, dtype=np.float32)
        numbers = (_unit(step_unit_exponent), np.array(scale, dtype=np.float64))
        library.call("perturbed", w_K, state_K, *numbers, z_K, len(z_K), out_K)
        return out_K
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
    """All queries in one pass over the state: rows +z_0, -z_0, +z_1, ... as `perturbed` gives them, [2q, k].

    Raises:
        InputError: shapes that disagree.
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
    """`s += c * z` in place; that no sum leaves the exact range is checked by whoever calls.

    Raises:
        InputError: other types or shapes.
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
    """The integer that multiplies `z`: `c = rint(-lr * projected_grad / (q * sigma * 2**e))`.

    In float64, half to even.

    Raises:
        InputError: the quotient is not finite.
    """
    unit = math.ldexp(1.0, step_unit_exponent)
    quotient = -learning_rate * projected_grad / (queries * sigma * unit)
    if not math.isfinite(quotient):
        raise InputError(
            f"expected a finite coefficient, got {quotient} from projected_grad {projected_grad}"
        )
    return round(quotient)


def step_unit_exponent_for(learning_rate: float, g_rms: float, queries: int, sigma: float = 1.0) -> int:
    """Exponent of the power of two nearest `lr * g_rms / (1024 q sigma)`: coefficients of some 1024 (rms).

    Args:
        sigma: root mean square of z (FORMAT 6); directions of large integers want a finer unit.

    Raises:
        InputError: the unit is not a positive finite number, or outside the format's range.
    """
    unit = learning_rate * g_rms / (_COEFFICIENT_RMS * queries * sigma)
    if not (math.isfinite(unit) and unit > 0):
        raise InputError(
            f"expected a positive finite step unit, got {unit} from lr {learning_rate}, g_rms {g_rms}"
        )
    return check_step_unit_exponent(round(math.log2(unit)))


def check_step_unit_exponent(exponent: int) -> int:
    """Return `exponent`, or raise InputError where it is outside FORMAT 7.1."""
    if not MIN_STEP_UNIT_EXPONENT <= exponent <= MAX_STEP_UNIT_EXPONENT:
        raise InputError(
            f"expected a step unit exponent from {MIN_STEP_UNIT_EXPONENT} to {MAX_STEP_UNIT_EXPONENT}, "
            f"got {exponent}"
        )
    return exponent


def state_digest(s_K: NDArray[np.int64], *, mask_digest: str, step_unit_exponent: int) -> str:
    """Name of a state: sha256 over domain, mask digest, exponent and the integers (FORMAT 10)."""
    digest = hashlib.sha256(_STATE_DOMAIN)
    digest.update(mask_digest.encode("ascii") + b"\0")
    digest.update(step_unit_exponent.to_bytes(4, "little", signed=True))
    digest.update(np.ascontiguousarray(s_K, dtype="<i8").data)
    return f"sha256:{digest.hexdigest()}"


def _exact(
    w_base_K: NDArray[np.float32], s_K: NDArray[np.int64], step_unit_exponent: int
) -> NDArray[np.float64]:
    if w_base_K.shape != s_K.shape:
        raise InputError(f"expected a state of shape {w_base_K.shape}, got {s_K.shape}")
    exact_K: NDArray[np.float64] = s_K.astype(np.float64)
    exact_K *= math.ldexp(1.0, step_unit_exponent)
    exact_K += w_base_K
    return exact_K


def _checked(
    w_base_K: NDArray[np.float32], s_K: NDArray[np.int64], z: NDArray[np.int8]
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int8]]:
    """The arrays as the kernels take them: contiguous, of their types and of one size."""
    w_K, state_K, z = np.ascontiguousarray(w_base_K), np.ascontiguousarray(s_K), np.ascontiguousarray(z)
    check_array("base weights", w_K, np.float32, (None,))
    check_array("the state", state_K, np.int64, w_K.shape)
    check_array("z", z, np.int8, (*z.shape[:-1], len(w_K)))
    return w_K, state_K, z


def _unit(step_unit_exponent: int) -> NDArray[np.float64]:
    return np.array(math.ldexp(1.0, step_unit_exponent))
