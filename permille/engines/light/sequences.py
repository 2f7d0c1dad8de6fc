"""Sequences laid end to end: the tokens of a batch that its losses need, without padding.

The last token of a sequence is never read, and what comes after its last target changes nothing, attention
being causal. So a sequence ends before its last target, and one without targets is left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.zo.estimators import Batch, SoftTargets

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedSequences:
    """Some sequences of a batch.

    Attributes:
        id_M: token ids, int64, one sequence after the other.
        position_M: each token's place in its sequence.
        sequences: where each sequence lies.
        state_R: index in `id_M` of the token before each target, row-major in the batch.
        target_R: the target tokens.
        soft: what is to be predicted in their place, if anything is.
    """

    id_M: NDArray[np.int64]
    position_M: NDArray[np.int64]
    sequences: tuple[slice, ...]
    state_R: NDArray[np.int64]
    target_R: NDArray[np.int64]
    soft: SoftTargets | None = None

    def only(self, index: int) -> "JoinedSequences":
        """Return one of the sequences, without targets."""
        part = self.sequences[index]
        nothing = np.empty(0, np.int64)
        return JoinedSequences(
            id_M=self.id_M[part],
            position_M=self.position_M[part],
            sequences=(slice(0, part.stop - part.start),),
            state_R=nothing,
            target_R=nothing,
        )


class LowerLayerStates:
    """Hidden states [T, H] below the first masked layer, by the tokens of their sequence, in memory.

    A mask of the upper layers (`--scope layers:11-`) has no value in the layers below: a sequence has the
    same hidden states there whatever the variant, the query or the epoch. Keeping them takes a step of a
    half-masked model to 0.44 of its time.

    A sequence is always computed alone, so its bits depend on its tokens, never on the batch that it was
    first met in: a resumed run computes what an uninterrupted one does. Nothing is dropped when the bound is
    reached, later sequences are merely not kept: an epoch comes back to every sequence once, so the least
    recently used would be the next one needed.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._states: dict[tuple[bytes, bool], Array] = {}

    def of(self, id_T: NDArray[np.int64], int8: bool, compute: Callable[[], Array]) -> Array:
        """The states of this sequence: kept ones, else computed. `int8`: with inputs of 8 bits."""
        key = (id_T.tobytes(), int8)
        found = self._states.get(key)
        if found is None:
            found = compute()
            if self._held_bytes + found.nbytes <= self._limit_bytes:
                self._states[key] = found
                self._held_bytes += found.nbytes
        return found


def join_sequences(batch: Batch, most_tokens: int) -> Iterator[JoinedSequences]:
    """The batch in parts of at most `most_tokens` tokens, or of one sequence where that is longer."""
    length_B = _needed(batch.target_BT)
    stop_B = np.cumsum(batch.target_BT.sum(axis=1))  # of the targets up to a row
    rows: list[int] = []
    tokens = 0
    for row in np.flatnonzero(length_B).tolist():
        length = int(length_B[row])
        if rows and tokens + length > most_tokens:
            yield _joined(batch, rows, length_B, stop_B)
            rows, tokens = [], 0
        rows.append(row)
        tokens += length
    yield _joined(batch, rows, length_B, stop_B)


def _needed(target_BT: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tokens before the last target of each row; 0 without one."""
    columns = np.arange(target_BT.shape[1])
    needed_B: NDArray[np.int64] = np.where(target_BT, columns, 0).max(axis=1)
    return needed_B


def _joined(
    batch: Batch, rows: list[int], length_B: NDArray[np.int64], stop_B: NDArray[np.int64]
) -> JoinedSequences:
    length_R = length_B[rows]
    stops = np.cumsum(length_R)
    starts = stops - length_R
    row_R, column_R = np.nonzero(batch.target_BT[rows])
    # Rows between the first and the last that are left out have no targets, so these are all in between.
    last = int(stop_B[rows[-1]])
    soft = None if batch.soft is None else batch.soft.rows(slice(last - len(row_R), last))
    return JoinedSequences(
        id_M=np.concatenate([batch.input_ids_BT[row, : length_B[row]] for row in rows]),
        position_M=np.concatenate([np.arange(length) for length in length_R]),
        sequences=tuple(
            slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ),
        state_R=starts[row_R] + column_R - 1,
        target_R=batch.input_ids_BT[rows][row_R, column_R],
        soft=soft,
    )
