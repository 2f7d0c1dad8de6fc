"""Tests of the lattice: one rounding, exact integers, and errors instead of saturation."""

import hashlib
import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permille.errors import InputError
from permille.zo.lattice import (
    STATE_LIMIT,
    coefficient,
    perturbed,
    state_digest,
    step_unit_exponent_for,
    values,
)

MASK = "sha256:" + "b" * 64

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)


@settings(max_examples=200, deadline=None)
@given(w=floats32, s=st.integers(-STATE_LIMIT, STATE_LIMIT), exponent=st.integers(-60, -10))
def test_values_round_once_to_float64_and_once_to_float32(w: float, s: int, exponent: int) -> None:
    got = values(np.array([w], np.float32), np.array([s], np.int64), exponent)
    assert got.dtype == np.float32
    # A Fraction is exact, and its float() rounds correctly, so this follows FORMAT 7.2 exactly.
    in_float64 = float(Fraction(w) + s * Fraction(2) ** exponent)
    (expected,) = struct.unpack("<f", struct.pack("<f", in_float64))
    assert float(got[0]) == expected


def test_state_zero_gives_the_package_values_bit_for_bit() -> None:
    w_K = np.array([0.1, -0.0, 1e-40, -3e38], dtype=np.float32)
    got = values(w_K, np.zeros(4, np.int64), -20)
    # Adding +0.0 in float64 turns -0.0 into 0.0. All other values keep their bits.
    assert got.tolist() == w_K.tolist()
    assert (got.view(np.uint32) == w_K.view(np.uint32)).tolist() == [True, False, True, True]


def test_perturbation_leaves_no_trace_and_both_signs_are_mirrored() -> None:
    w_K = np.array([1.0, -2.0, 0.5], dtype=np.float32)
    s_K = np.array([3, -5, 7], dtype=np.int64)
    z_K = np.array([1, -1, 1], dtype=np.int8)
    before = s_K.copy()
    plus = perturbed(w_K, s_K, -10, z_K, 0.25)
    minus = perturbed(w_K, s_K, -10, z_K, -0.25)
    assert plus.tolist() == [1.0 + 3 / 1024 + 0.25, -2.0 - 5 / 1024 - 0.25, 0.5 + 7 / 1024 + 0.25]
    assert minus.tolist() == [1.0 + 3 / 1024 - 0.25, -2.0 - 5 / 1024 + 0.25, 0.5 + 7 / 1024 - 0.25]
    assert np.array_equal(s_K, before)


def coefficient_of(projected_grad: float, **changes: Any) -> int:
    factors: dict[str, Any] = {"learning_rate": 1.0, "queries": 1, "sigma": 1.0, "step_unit_exponent": 0}
    return coefficient(projected_grad=projected_grad, **factors | changes)


@pytest.mark.parametrize(
    ("projected_grad", "expected"), [(0.5, 0), (1.5, -2), (2.5, -2), (-0.5, 0), (-3.5, 4), (0.0, 0)]
)
def test_coefficient_rounds_half_to_even_and_undoes_factors(projected_grad: float, expected: int) -> None:
    assert coefficient_of(projected_grad) == expected
    factors = {"learning_rate": 0.5, "queries": 4, "sigma": 2.0, "step_unit_exponent": -3}
    assert coefficient_of(2 * projected_grad, **factors) == expected


@pytest.mark.parametrize("projected_grad", [math.nan, math.inf, -math.inf, 1e10])
def test_coefficient_refuses_what_is_not_finite(projected_grad: float) -> None:
    """The last case is a quotient that overflows."""
    with pytest.raises(InputError, match="finite"):
        coefficient_of(projected_grad, learning_rate=1e300, step_unit_exponent=-100)


@settings(max_examples=100, deadline=None)
@given(learning_rate=st.floats(1e-9, 1e3), g_rms=st.floats(1e-6, 1e3), queries=st.integers(1, 64))
def test_step_unit_makes_coefficients_of_about_1024(learning_rate: float, g_rms: float, queries: int) -> None:
    exponent = step_unit_exponent_for(learning_rate, g_rms, queries)
    factors = {"learning_rate": learning_rate, "queries": queries, "step_unit_exponent": exponent}
    c = abs(coefficient_of(g_rms, **factors))
    assert 1024 / math.sqrt(2) - 1 <= c <= 1024 * math.sqrt(2) + 1


@pytest.mark.parametrize(
    ("learning_rate", "g_rms"), [(0.0, 1.0), (1.0, math.nan), (math.inf, 1.0), (1e-300, 1e-9)]
)
def test_step_unit_refuses_what_has_no_exponent(learning_rate: float, g_rms: float) -> None:
    with pytest.raises(InputError, match="step unit"):
        step_unit_exponent_for(learning_rate, g_rms, 1)


def test_state_digest_is_the_hash_that_the_format_states() -> None:
    integers = [0, -1, 2**40]
    expected = hashlib.sha256(
        b"permille-state-1\0" + MASK.encode() + b"\0" + struct.pack("<i", -20) + struct.pack("<3q", *integers)
    ).hexdigest()
    got = state_digest(np.array(integers, np.int64), mask_digest=MASK, step_unit_exponent=-20)
    assert got == f"sha256:{expected}"


def test_a_state_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match="shape"):
        values(np.zeros(4, np.float32), np.zeros(5, np.int64), -20)
