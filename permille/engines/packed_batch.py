"""A batch without padding: the tokens of all sequences in one row, and where their targets are. numpy only.

Attention is causal, so nothing after the last target of a sequence can change a loss: those tokens are left
out, and so are sequences without a target. The last token of a text is never an input, for instance.

Sequences of equal length stand side by side, so that attention can take them together.

# Legend: B sequences, T positions, M packed tokens, R target tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.zo.estimators import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Sequences that have a target, the longest first.

    Attributes:
        ids_M: token ids.
        position_M: position of each token in its own sequence.
        length_B: lengths in the order of packing, none zero; their sum is M.
        state_R: which packed token's hidden state predicts each target.
        target_R: the ids of the targets. Targets are in row-major order of the batch.
    """

    ids_M: NDArray[np.int64]
    position_M: NDArray[np.int64]
    length_B: NDArray[np.int64]
    state_R: NDArray[np.int64]
    target_R: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """M."""
        return len(self.ids_M)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each sequence begins, [B]."""
        return np.cumsum(self.length_B) - self.length_B

    def rows(self) -> list[NDArray[np.int64]]:
        """The token ids of each sequence, in the order of packing."""
        return np.split(self.ids_M, self.starts[1:])

    def only(self, rows: list[int]) -> "PackedBatch":
        """Some of the sequences, by their place here, without targets."""
        return _packed([self.rows()[row] for row in rows])


def pack(batch: Batch) -> PackedBatch:
    """Pack a checked batch that has a target."""
    needed_B = _needed(batch)
    order = [int(row) for row in np.argsort(-needed_B, kind="stable") if needed_B[row]]
    packed = _packed([batch.input_ids_BT[row, : needed_B[row]] for row in order])
    start_B = np.zeros(len(needed_B), np.int64)
    start_B[order] = packed.starts
    row_R, column_R = np.nonzero(batch.target_BT)
    return PackedBatch(
        ids_M=packed.ids_M,
        position_M=packed.position_M,
        length_B=packed.length_B,
        state_R=start_B[row_R] + column_R - 1,
        target_R=batch.input_ids_BT[batch.target_BT],
    )


def packed_parts(batch: Batch, max_tokens: int) -> Iterator[PackedBatch]:
    """A checked batch in parts of at most `max_tokens` tokens, or of one longer sequence, rows in order."""
    needed_B = _needed(batch)
    first, tokens = 0, 0
    for row, needed in enumerate(needed_B.tolist()):
        if tokens and tokens + needed > max_tokens:
            yield pack(_rows(batch, first, row))
            first, tokens = row, 0
        tokens += needed
    if tokens:
        yield pack(_rows(batch, first, len(needed_B)))


def _needed(batch: Batch) -> NDArray[np.int64]:
    """Tokens of each sequence before its last target; 0 for one without a target."""
    columns = batch.target_BT.shape[1]
    last_B = columns - 1 - np.argmax(batch.target_BT[:, ::-1], axis=1)
    return np.where(batch.target_BT.any(axis=1), last_B, 0).astype(np.int64)


def _packed(rows: list[NDArray[np.int64]]) -> PackedBatch:
    nothing = np.zeros(0, np.int64)
    return PackedBatch(
        ids_M=np.concatenate(rows),
        position_M=np.concatenate([np.arange(len(row)) for row in rows]),
        length_B=np.array([len(row) for row in rows], np.int64),
        state_R=nothing,
        target_R=nothing,
    )


def _rows(batch: Batch, first: int, last: int) -> Batch:
    return Batch(
        input_ids_BT=batch.input_ids_BT[first:last],
        attention_BT=batch.attention_BT[first:last],
        target_BT=batch.target_BT[first:last],
    )
