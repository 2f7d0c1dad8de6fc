"""Rows of a batch that ask nothing new: candidates after one prompt, of which a longer one was computed.

What predicts a token sees what stands before it and nothing else. So a row needs no forward pass of its own
if other rows begin with all that stands before each of its targets, and ask there too: of two candidates of
one word one is enough, and "great" comes with "terr|ible".

# Legend: B rows, T tokens, R targets.
"""

import numpy as np
from numpy.typing import NDArray

from permille.zo.estimators import Batch


def distinct_rows(batch: Batch) -> tuple[Batch, NDArray[np.int64]]:
    """The rows that are needed, in their order, and for each target of the batch the target of the result
    that has the same tokens before it, int64 [R], both row-major."""
    questions = [_questions(batch, row) for row in range(len(batch.input_ids_BT))]
    # Longest first: it may answer for others. The sort is stable, so of equal rows the first one stays.
    asked: set[bytes] = set()
    kept: list[int] = []
    for row in np.argsort(-batch.attention_BT.sum(axis=1), kind="stable").tolist():
        if not questions[row] or not asked.issuperset(questions[row]):
            kept.append(row)
            asked.update(questions[row])
    kept.sort()
    places: dict[bytes, int] = {}
    number = 0
    for row in kept:
        for question in questions[row]:
            places.setdefault(question, number)
            number += 1
    entry_R = np.array([places[question] for row in questions for question in row], dtype=np.int64)
    distinct = Batch(
        input_ids_BT=batch.input_ids_BT[kept],
        attention_BT=batch.attention_BT[kept],
        target_BT=batch.target_BT[kept],
    )
    return distinct, entry_R


def _questions(batch: Batch, row: int) -> list[bytes]:
    """For each target of a row, what stands before it; unlike any other row's where gaps are in it."""
    attended_T = batch.attention_BT[row]
    whole = bool(attended_T[: int(attended_T.sum())].all())
    own = b"" if whole else f"row {row}: ".encode()
    ids_T = batch.input_ids_BT[row]
    return [own + ids_T[:place].tobytes() for place in np.flatnonzero(batch.target_BT[row]).tolist()]
