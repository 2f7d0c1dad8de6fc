"""Packing against the batch it came from: which tokens are computed, and where targets find their states."""

import numpy as np
import pytest

from permille.engines.packed_batch import pack, packed_parts
from permille.zo.estimators import Batch
from tests.unit.engines.tiny import tiny_batch


def four_rows() -> Batch:
    """Lengths before the last target: 3, 0 (no target), 1, 3."""
    return Batch(
        input_ids_BT=np.arange(1, 21).reshape(4, 5),
        attention_BT=np.ones((4, 5), bool),
        target_BT=np.array([[0, 1, 0, 1, 0], [0] * 5, [0, 1, 0, 0, 0], [0, 0, 0, 1, 0]], bool),
    )


def test_only_tokens_before_a_last_target_are_packed() -> None:
    packed = pack(four_rows())
    assert packed.length_B.tolist() == [3, 3, 1]
    assert packed.ids_M.tolist() == [1, 2, 3, 16, 17, 18, 11]
    assert packed.position_M.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert packed.starts.tolist() == [0, 3, 6]
    assert packed.tokens == 7


def test_targets_keep_the_order_of_the_batch() -> None:
    packed = pack(four_rows())
    assert packed.target_R.tolist() == [2, 4, 12, 19]
    assert packed.ids_M[packed.state_R].tolist() == [1, 3, 11, 18]


@pytest.mark.parametrize("seed", range(5))
def test_the_state_before_each_target_is_that_of_the_token_before(seed: int) -> None:
    batch = tiny_batch(seed=seed, lengths=(9, 12, 2, 12, 5))
    packed = pack(batch)
    row, column = np.nonzero(batch.target_BT)
    np.testing.assert_array_equal(packed.ids_M[packed.state_R], batch.input_ids_BT[row, column - 1])
    np.testing.assert_array_equal(packed.position_M[packed.state_R], column - 1)
    assert (np.diff(packed.length_B) <= 0).all()
    for ids, length in zip(packed.rows(), packed.length_B, strict=True):
        assert len(ids) == length


def test_some_rows_are_packed_as_they_stand() -> None:
    packed = pack(four_rows())
    some = packed.only([2, 0])
    assert some.ids_M.tolist() == [11, 1, 2, 3]
    assert some.position_M.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("max_tokens", "lengths"),
    [(1, [[3], [1], [3]]), (4, [[3, 1], [3]]), (7, [[3, 3, 1]]), (6, [[3, 1], [3]])],
)
def test_parts_hold_whole_sequences_within_the_bound(max_tokens: int, lengths: list[list[int]]) -> None:
    batch = four_rows()
    parts = list(packed_parts(batch, max_tokens))
    assert [part.length_B.tolist() for part in parts] == lengths
    targets = np.concatenate([part.target_R for part in parts])
    np.testing.assert_array_equal(targets, batch.input_ids_BT[batch.target_BT])
