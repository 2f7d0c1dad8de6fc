"""Tests of an engine's inputs: those that it refuses, and padding that it cuts off."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from permille.engines.inputs import ModelLimits, check_batch, check_prompt, check_values
from permille.errors import InputError
from permille.zo.estimators import Batch

LIMITS = ModelLimits(k=3, vocabulary=10, positions=6)


def batch(**changes: Any) -> Batch:
    arrays = {
        "input_ids_BT": np.array([[1, 2, 3, 4, 0], [5, 6, 0, 0, 0]]),
        "attention_BT": np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool),
        "target_BT": np.array([[0, 0, 1, 1, 0], [0, 1, 0, 0, 0]], bool),
    }
    return Batch(**(arrays | changes))


def with_cell(name: str, cell: tuple[int, int | slice], value: Any) -> Batch:
    array = getattr(batch(), name).copy()
    array[cell] = value
    return batch(**{name: array})


def test_columns_that_are_padding_everywhere_are_cut() -> None:
    got = check_batch(batch(), LIMITS)
    np.testing.assert_array_equal(got.input_ids_BT, [[1, 2, 3, 4], [5, 6, 0, 0]])
    assert got.attention_BT.shape == got.target_BT.shape == (2, 4)


def test_tokens_in_the_padding_may_be_anything() -> None:
    got = check_batch(with_cell("input_ids_BT", (1, 3), 10**9), LIMITS)
    np.testing.assert_array_equal(got.input_ids_BT[1], [5, 6, 0, 0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda: batch(input_ids_BT=np.zeros((2, 5), np.int32)), "int64"),
        (lambda: batch(input_ids_BT=np.zeros(5, np.int64)), "int64"),
        (lambda: batch(input_ids_BT=np.zeros((0, 5), np.int64)), "int64"),
        (lambda: batch(attention_BT=np.ones((2, 5), np.int64)), "attention bool"),
        (lambda: batch(attention_BT=np.ones((2, 4), bool)), "attention bool"),
        (lambda: batch(target_BT=np.ones((1, 5), bool)), "target bool"),
        (lambda: with_cell("attention_BT", (0, 1), False), "right padding"),
        (lambda: with_cell("attention_BT", (1, 4), True), "right padding"),
        (lambda: with_cell("attention_BT", (1, slice(None)), False), "in row 1"),
        (lambda: batch(target_BT=np.zeros((2, 5), bool)), "no target token"),
        (lambda: with_cell("target_BT", (0, 0), True), "after position 0"),
        (lambda: with_cell("target_BT", (1, 2), True), "outside the padding"),
        (lambda: with_cell("input_ids_BT", (0, 1), 10), "0 to 9"),
        (lambda: with_cell("input_ids_BT", (0, 1), -1), "0 to 9"),
    ],
)
def test_batches_that_are_wrong_are_refused(changed: Callable[[], Batch], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_batch(changed(), LIMITS)


def test_sequences_beyond_the_models_positions_are_refused() -> None:
    with pytest.raises(InputError, match="takes at most 3"):
        check_batch(batch(), ModelLimits(k=3, vocabulary=10, positions=3))
    check_batch(batch(), ModelLimits(k=3, vocabulary=10, positions=None))


F32, I64 = np.float32, np.int64
VALUES = [np.zeros(3, F32), np.zeros((1, 2), F32), np.zeros((1, 3)), np.zeros((0, 3), F32)]
PROMPTS = [np.zeros(0, I64), np.zeros((1, 2), I64), np.zeros(2), np.array([10]), np.zeros(6, I64)]


@pytest.mark.parametrize(
    ("check", "message", "wrong"),
    [
        *((check_values, "expected", values) for values in VALUES),
        *((check_prompt, "expected|Shorten the prompt", prompt) for prompt in PROMPTS),
    ],
)
def test_arrays_that_are_wrong_are_refused(check: Any, message: str, wrong: np.ndarray[Any, Any]) -> None:
    with pytest.raises(InputError, match=message):
        check(wrong, LIMITS)
