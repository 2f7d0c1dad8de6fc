"""What `measurements.json` says of precision: written with few digits, read with doubt."""

import json
from dataclasses import replace
from typing import Any

import pytest

from permille.package.measurements import (
    MAX_ROWS,
    PrecisionRow,
    best_epsilon,
    precision_measurements,
    precision_rows,
)

ROW = PrecisionRow(
    engine="torch",
    version="permille 0.1.0, torch 2.13.0",
    compute_dtype="float32",
    epsilon=0.01,
    relative_error=0.00123456,
    cosine=0.99999999,
    bfloat16_cosine=0.123456,
    directions=32,
    tokens=124,
)


def plain(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = precision_measurements([ROW])["precision"][0]
    return row | changes


def test_rows_come_back_with_three_digits_of_what_was_measured() -> None:
    rows = [ROW, replace(ROW, relative_error=None, compute_dtype="bfloat16")]
    read = precision_rows(json.loads(json.dumps(precision_measurements(rows))))
    short = replace(ROW, relative_error=0.00123, cosine=1.0, bfloat16_cosine=0.123)
    assert read == (short, replace(short, relative_error=None, compute_dtype="bfloat16"))


def test_the_smallest_error_of_the_compute_type_wins_and_the_larger_epsilon_of_equals() -> None:
    rows = [
        replace(ROW, epsilon=0.1, relative_error=0.2),
        replace(ROW, epsilon=0.01, relative_error=0.1),
        replace(ROW, epsilon=0.02, relative_error=0.1),
        replace(ROW, epsilon=0.005, relative_error=None),
        replace(ROW, epsilon=0.3, relative_error=0.01, compute_dtype="bfloat16"),
    ]
    assert best_epsilon(rows) == 0.02
    assert best_epsilon(rows, "bfloat16") == 0.3
    assert best_epsilon(rows, "float16") is None
    assert best_epsilon([replace(ROW, relative_error=1.0)]) is None


@pytest.mark.parametrize(
    "measurements",
    [
        None,
        {},
        {"precision": None},
        {"precision": {"0": plain()}},
        {"precision": "row" * 1000},
        {"precision": [None, 1, "x", [plain()], [], {}]},
        {"error_of_g": 0},
    ],
)
def test_what_is_no_list_of_rows_says_nothing(measurements: dict[str, Any] | None) -> None:
    assert precision_rows(measurements) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 0},
        {"epsilon": -0.1},
        {"epsilon": True},
        {"epsilon": "0.1"},
        {"epsilon": [0.1]},
        {"epsilon": None},
        {"epsilon": 10**400},
        {"epsilon": 1e300},
        {"relative_error": -0.1},
        {"relative_error": "small"},
        {"relative_error": False},
        {"relative_error": -(10**400)},
        {"cosine": 2},
        {"bfloat16_cosine": -1.5},
        {"directions": 0},
        {"directions": 32.5},
        {"tokens": True},
        {"tokens": 10**400},
        {"engine": ""},
        {"engine": {"name": "torch"}},
        {"version": "v" * 201},
        {"version": "a\nb"},
        {"compute_dtype": "\x1b[31m"},
    ],
)
def test_a_row_that_is_not_of_the_form_is_passed_over_and_the_others_count(changes: dict[str, Any]) -> None:
    good = plain(note="of a later version")
    assert len(precision_rows({"precision": [plain(**changes), good]})) == 1


@pytest.mark.parametrize("missing", sorted(plain()))
def test_a_row_that_lacks_something_is_passed_over(missing: str) -> None:
    row = plain()
    del row[missing]
    assert precision_rows({"precision": [row]}) == ()


def test_rows_without_end_are_cut() -> None:
    assert len(precision_rows({"precision": [plain()] * (MAX_ROWS + 1)})) == MAX_ROWS
