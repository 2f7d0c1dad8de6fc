"""Averages of logs: the mean of the models, whatever units the logs were written on."""

from fractions import Fraction

import numpy as np
import pytest

from permille.errors import InputError, PackageError
from permille.zo.aggregate import Contribution, aggregate, scaled_coefficients
from permille.zo.replay import replay
from tests.unit.zo.logs import header_kinds, make_exponents, make_header, random_rows


def make_contribution(
    *, weight: int = 1, rows: list[list[int]] | None = None, **changes: object
) -> Contribution:
    header = make_header(**changes)
    coefficients_TQ = np.array(rows if rows is not None else random_rows(20, seed=header.seed % 97))
    return Contribution(header=header, coefficients_TQ=coefficients_TQ, weight=weight)


def test_the_aggregate_is_the_weighted_mean_of_the_models() -> None:
    contributions = [
        make_contribution(seed=1, weight=3, step_unit_exponent=-20),
        make_contribution(seed=2, weight=1, step_unit_exponent=-23),
        make_contribution(seed=3, weight=7, step_unit_exponent=-18),
    ]
    got = aggregate(contributions)
    moved_K = np.zeros(contributions[0].header.k)
    for c in contributions:
        moved_K += c.weight / 11 * replay(c.header, c.coefficients_TQ) * 2.0**c.header.step_unit_exponent
    # Rounding is at most half a unit for each of the 3 * 20 * 2 coefficients
    assert got.step_unit_exponent == -31
    assert np.abs(got.s_K * 2.0**-31 - moved_K).max() <= 60 * 2.0**-31


def test_one_log_alone_is_its_own_mean() -> None:
    contribution = make_contribution(weight=5)
    got = aggregate([contribution], guard_bits=3)
    assert got.step_unit_exponent == -23
    assert np.array_equal(got.s_K, 8 * replay(contribution.header, contribution.coefficients_TQ))


def test_the_order_of_the_logs_does_not_matter() -> None:
    contributions = [make_contribution(seed=seed, weight=seed) for seed in range(1, 5)]
    assert np.array_equal(aggregate(contributions).s_K, aggregate(contributions[::-1], threads=2).s_K)


@pytest.mark.parametrize("c", [-7, -3, -1, 0, 1, 2, 3, 5, 12345])
@pytest.mark.parametrize(("weight", "total"), [(1, 2), (1, 3), (2, 4), (3, 7)])
def test_shares_are_rounded_half_to_even(c: int, weight: int, total: int) -> None:
    contribution = make_contribution(weight=weight, rows=[[c, 0]])
    got = scaled_coefficients(contribution, total_weight=total, step_unit_exponent=-20)
    assert got == [round(Fraction(c * weight, total)), 0]


def test_nothing_weightless_logs_and_a_coarser_unit_are_refused() -> None:
    with pytest.raises(InputError, match="at least one log"):
        aggregate([])
    with pytest.raises(InputError, match="weight"):
        aggregate([make_contribution(weight=0)])
    with pytest.raises(InputError, match="expected a unit"):
        scaled_coefficients(make_contribution(), total_weight=1, step_unit_exponent=-19)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"package_digest": "sha256:" + "c" * 64}, "log-binding"),
        ({"mask_digest": "sha256:" + "c" * 64}, "log-binding"),
        ({"counts": (130, 17, 0)}, "log-binding"),
        ({}, "log-duplicate"),
    ],
)
def test_logs_that_do_not_belong_together_are_refused(changes: dict[str, object], code: str) -> None:
    with pytest.raises(PackageError, match=f"^{code}:"):
        aggregate([make_contribution(), make_contribution(**changes)])  # type: ignore[arg-type]


def test_a_sum_out_of_the_exact_range_is_refused() -> None:
    fine = make_contribution(seed=1, step_unit_exponent=-100)
    coarse = make_contribution(seed=2, step_unit_exponent=-20)
    with pytest.raises(PackageError, match=r"^log-limit:"):
        aggregate([fine, coarse])


def test_an_average_of_different_kinds_is_the_sum_of_its_scaled_logs() -> None:
    exponents = make_exponents(130)
    headers = header_kinds((70, 0, 60), exponents)
    rows = [random_rows(15, 3, seed=n) for n in range(len(headers))]
    found = aggregate(
        [
            Contribution(header=header, coefficients_TQ=np.array(row), weight=1)
            for header, row in zip(headers, rows, strict=True)
        ],
        exponents,
        guard_bits=0,
    )
    expected_K = sum(
        replay(header, np.array([[round(c / len(headers)) for c in step] for step in row]), exponents)
        for header, row in zip(headers, rows, strict=True)
    )
    assert np.array_equal(found.s_K, expected_K)
