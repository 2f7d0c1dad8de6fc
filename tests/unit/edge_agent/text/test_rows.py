"""Tests of rows and batches: no lost target, no prediction across documents, order by seed and step."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from permille_agent.text.rows import (
    Row,
    TrainingBatches,
    batch_of,
    document_rows,
    evaluation_batches,
    packed_rows,
    rows_digest,
    rows_in_pieces,
)
from permille_agent.text.tokens import TokenizedDocument


def _documents(lengths: list[int]) -> list[TokenizedDocument]:
    documents = []
    first = 10
    for length in lengths:
        ids_T = np.arange(first, first + length, dtype=np.int64)
        target_T = np.ones(length, dtype=np.bool_)
        target_T[:1] = False
        documents.append(TokenizedDocument(ids_T, target_T, np.full(length, 3, dtype=np.int64)))
        first += length
    return documents


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(2, 16))
def test_packing_keeps_every_target_and_predicts_nothing_across_documents(
    lengths: list[int], width: int
) -> None:
    documents = _documents(lengths)
    packed = packed_rows(documents, width)
    single = document_rows(documents, width)
    assert sum(row.target_T.sum() for row in packed) == sum(row.target_T.sum() for row in single)
    assert sorted(i for row in packed for i in row.ids_T.tolist()) == sorted(
        i for row in single for i in row.ids_T.tolist()
    )
    for row in packed:
        assert 0 < len(row.ids_T) <= width
        first_of_part = np.concatenate([[True], np.diff(row.ids_T) != 1])
        assert not row.target_T[first_of_part].any()
        assert (row.document_T[1:] == row.document_T[:-1])[row.target_T[1:]].all()


def test_short_documents_share_rows() -> None:
    assert len(packed_rows(_documents([8, 3, 5, 2, 6]), 8)) == 3
    assert len(document_rows(_documents([8, 3, 5, 2, 6]), 8)) == 5


def test_a_document_without_a_target_makes_no_row() -> None:
    assert document_rows(_documents([1, 0]), 8) == []


def test_a_batch_is_right_padded() -> None:
    batch = batch_of(document_rows(_documents([2, 4]), 8))
    assert batch.input_ids_BT.tolist() == [[10, 11, 0, 0], [12, 13, 14, 15]]
    assert batch.attention_BT.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.target_BT.tolist() == [[False, True, False, False], [False, True, True, True]]


def test_batches_are_a_function_of_seed_and_step_and_read_each_row_once_an_epoch() -> None:
    rows = document_rows(_documents([4] * 10), 4)
    batches = TrainingBatches(rows, batch_rows=3, seed=1)
    seen = [tuple(row) for step in range(10) for row in batches(step).input_ids_BT.tolist()]
    assert all(len(set(seen[start : start + 10])) == 10 for start in (0, 10, 20))
    assert seen[:10] != seen[10:20]
    again = TrainingBatches(rows, batch_rows=3, seed=1)
    assert again(7).input_ids_BT.tolist() == batches(7).input_ids_BT.tolist()
    other = TrainingBatches(rows, batch_rows=3, seed=2)
    assert [other(s).input_ids_BT.tolist() for s in range(4)] != [
        batches(s).input_ids_BT.tolist() for s in range(4)
    ]


def test_the_order_of_rows_is_pinned() -> None:
    rows = document_rows(_documents([2] * 6), 2)
    batches = TrainingBatches(rows, batch_rows=6, seed=0)

    def key(row: int) -> bytes:
        return hashlib.blake2b(b"permille-order-1\x000\x000\x00%d" % row, digest_size=16).digest()

    assert [(row[0] - 10) // 2 for row in batches(0).input_ids_BT.tolist()] == sorted(range(6), key=key)


def test_tokens_read_are_counted() -> None:
    rows = document_rows(_documents([4, 2, 3]), 4)
    batches = TrainingBatches(rows, batch_rows=2, seed=0)
    for steps in range(5):
        read = sum(int(batches(step).attention_BT.sum()) for step in range(steps))
        assert batches.tokens(steps) == read


def test_a_batch_is_never_larger_than_all_rows() -> None:
    rows = document_rows(_documents([4, 4]), 4)
    assert TrainingBatches(rows, batch_rows=8, seed=0)(0).input_ids_BT.shape == (2, 4)


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_an_evaluation_reads_every_row_once_within_its_bound(tokens: int) -> None:
    rows = document_rows(_documents([5, 1, 9, 3, 20, 2]), 8)
    parts = list(evaluation_batches(rows, tokens=tokens))
    documents = np.concatenate([part.document_N for part in parts])
    assert sorted(documents.tolist()) == sorted(
        np.concatenate([r.document_T[r.target_T] for r in rows]).tolist()
    )
    assert all(part.batch.input_ids_BT.size <= max(tokens, 8) for part in parts)
    assert all(len(part.document_N) == part.batch.target_BT.sum() for part in parts)
    assert sum(int(part.bytes_N.sum()) for part in parts) == 3 * len(documents)


def test_the_digest_sees_every_token_and_target() -> None:
    rows = document_rows(_documents([4, 6]), 4)
    digest = rows_digest([rows, rows])
    assert digest == rows_digest([rows, rows])
    assert digest != rows_digest([rows])
    rows[0].ids_T[1] += 1
    assert digest != (changed := rows_digest([rows, rows]))
    rows[0].target_T[1] = False
    assert changed != rows_digest([rows, rows])


def test_pieces_of_rows_are_equal_and_no_two_rows_share_one() -> None:
    def row(targets: int) -> Row:
        target_T = np.array([False] + [True] * targets + [False])
        ids_T = np.zeros(targets + 2, np.int64)
        return Row(ids_T, target_T, ids_T, ids_T)

    cut = rows_in_pieces([row(127), row(20), row(95), row(96)], 64)
    counts = [np.bincount(each.document_T[each.target_T]).tolist() for each in cut]
    assert [[n for n in one if n] for one in counts] == [[64, 63], [20], [95], [48, 48]]
    assert [int(each.document_T[each.target_T].max()) for each in cut] == [1, 2, 3, 5]


def _begun_documents(lengths: list[int]) -> list[TokenizedDocument]:
    """Documents of a model that reads a 2 before every text, and predicts the first token from it."""
    return [
        replace(document, bos=(2,), target_T=np.ones(len(document.ids_T), np.bool_))
        for document in _documents(lengths)
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(6, 16))
def test_with_bos_every_sequence_of_a_batch_begins_with_it_and_holds_one_document(
    lengths: list[int], width: int
) -> None:
    documents = _begun_documents(lengths)
    for rows in (document_rows(documents, width), packed_rows(documents, width)):
        assert max(len(row.ids_T) for row in rows) <= width
        batch = batch_of(rows)
        counted = []
        for ids_T, attention_T, target_T in zip(
            batch.input_ids_BT, batch.attention_BT, batch.target_BT, strict=True
        ):
            read_T = ids_T[attention_T]
            assert read_T[0] == 2
            assert (np.diff(read_T[1:]) == 1).all()  # ids count on through a document, and jump between two
            counted += ids_T[target_T].tolist()
        # Every token of the text counts once, also the first one, and no token of context.
        assert sorted(counted) == [i for document in documents for i in document.ids_T.tolist()]


def test_short_documents_with_bos_share_the_work_of_a_row_but_not_its_attention() -> None:
    rows = packed_rows(_begun_documents([7, 2, 4]), 8)
    assert [row.breaks for row in rows] == [(), (5,)]
    assert [row.ids_T.tolist() for row in rows][1] == [2, 19, 20, 21, 22, 2, 17, 18]
    assert batch_of(rows).input_ids_BT.shape == (3, 8)


def test_the_digest_tells_how_documents_with_bos_share_a_row() -> None:
    rows = packed_rows(_begun_documents([7, 2, 4]), 8)
    assert rows_digest([rows]) != rows_digest([[replace(row, breaks=()) for row in rows]])


def test_a_document_that_lost_its_beginning_has_no_target_without_a_predecessor() -> None:
    [document] = _begun_documents([9])
    kept = document.between(4, None)
    assert (kept.bos, kept.target_T.tolist()) == ((2,), [False, True, True, True, True])
    assert document.between(0, -4).target_T.all()
