"""Rows of a batch that ask the same question: candidates of one word after one prompt.

What predicts a row's last token does not see it, so rows that are equal before it share one forward pass.

# Legend: B rows, T tokens, R targets.
"""

import numpy as np
from numpy.typing import NDArray

from permille.zo.estimators import Batch


def distinct_rows(batch: Batch) -> tuple[Batch, NDArray[np.int64]]:
    """The batch without repeated rows, and for each of its targets the target of the result that has the same
    tokens before it, int64 [R], both row-major.

    Two rows are one where they are equal in all but the last attended token, which is their only target.
    """
    ids_BT, target_BT = batch.input_ids_BT, batch.target_BT
    places: dict[bytes, int] = {}
    kept: list[int] = []
    of_row: list[int] = []
    for row, (ids_T, attended_T, target_T) in enumerate(
        zip(ids_BT, batch.attention_BT, target_BT, strict=True)
    ):
        length = int(attended_T.sum())
        alone = int(target_T.sum()) == 1 and bool(target_T[length - 1]) and bool(attended_T[:length].all())
        key = ids_T[: length - 1].tobytes() if alone else f"row {row}".encode()
        if key not in places:
            places[key] = len(kept)
            kept.append(row)
        of_row.append(places[key])
    counts = target_BT[kept].sum(axis=1)
    starts = np.concatenate([[0], np.cumsum(counts)])
    entry_R = np.concatenate([np.arange(starts[place], starts[place + 1]) for place in of_row])
    distinct = Batch(
        input_ids_BT=ids_BT[kept], attention_BT=batch.attention_BT[kept], target_BT=target_BT[kept]
    )
    return distinct, entry_R.astype(np.int64)
