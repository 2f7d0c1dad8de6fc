"""Sequences joined end to end: the tokens of a batch that its losses need, without padding.

Attention is causal, so the loss of a target depends only on the tokens before it. Each sequence is therefore
cut before its last target. A sequence without targets is left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.engines.key_values import KeyValues
from permille.zo.estimators import Batch, SoftTargets

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedSequences:
    """Some sequences of a batch.

    Attributes:
        id_M: token ids, int64, one sequence after the other.
        position_M: each token's position in its text.
        sequences: the range of each sequence in `id_M`.
        state_R: the index in `id_M` of the token before each target, row-major in the batch.
        target_R: the target tokens.
        soft: soft targets, or None for the tokens themselves.
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
    """Cache of the hidden states [T, H] below the first masked layer.

    The key is a sequence's tokens, and the keys and values that they follow.

    With `--scope layers:11-`, for example, the layers below layer 11 have no trained values. In these layers,
    a sequence has the same hidden states for all variants, in every step and epoch. If only the upper half of
    the layers is masked, a step with the cache takes 0.44 of the time of a step without it.

    Each sequence is computed alone, so its bits do not depend on the batch, and a resumed run gets the same
    bits. A full cache stores no further sequences, and never drops one. Each epoch uses every sequence once.
    So the least recently used sequence would be the one that is needed next, and must not be dropped.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._states: dict[tuple[bytes, bool, KeyValues | None], Array] = {}

    def of(
        self, id_T: NDArray[np.int64], int8: bool, after: KeyValues | None, compute: Callable[[], Array]
    ) -> Array:
        """Return the states of a sequence from the cache, or compute and store them."""
        # 8-bit inputs and float32 inputs give different states, so they are stored separately.
        key = (id_T.tobytes(), int8, after)
        found = self._states.get(key)
        if found is None:
            found = compute()
            if self._held_bytes + found.nbytes <= self._limit_bytes:
                self._states[key] = found
                self._held_bytes += found.nbytes
        return found


def join_sequences(batch: Batch, most_tokens: int, first: int = 0) -> Iterator[JoinedSequences]:
    """Divide a batch into parts of at most `most_tokens` tokens. A longer sequence is a part of its own.

    The first token of each sequence is at position `first`.
    """
    length_B = _needed(batch.target_BT)
    stop_B = np.cumsum(batch.target_BT.sum(axis=1))  # the number of targets up to and including each row
    rows: list[int] = []
    tokens = 0
    for row in np.flatnonzero(length_B).tolist():
        length = int(length_B[row])
        if rows and tokens + length > most_tokens:
            yield _joined(batch, rows, length_B, stop_B, first)
            rows, tokens = [], 0
        rows.append(row)
        tokens += length
    yield _joined(batch, rows, length_B, stop_B, first)


def _needed(target_BT: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of tokens before the last target of each row, or 0 for a row without targets."""
    columns = np.arange(target_BT.shape[1])
    needed_B: NDArray[np.int64] = np.where(target_BT, columns, 0).max(axis=1)
    return needed_B


def _joined(
    batch: Batch, rows: list[int], length_B: NDArray[np.int64], stop_B: NDArray[np.int64], first: int
) -> JoinedSequences:
    length_R = length_B[rows]
    stops = np.cumsum(length_R)
    starts = stops - length_R
    row_R, column_R = np.nonzero(batch.target_BT[rows])
    # `join_sequences` skips only rows without targets, so the soft targets of `rows` are contiguous.
    last = int(stop_B[rows[-1]])
    soft = None if batch.soft is None else batch.soft.rows(slice(last - len(row_R), last))
    return JoinedSequences(
        id_M=np.concatenate([batch.input_ids_BT[row, : length_B[row]] for row in rows]),
        position_M=np.concatenate([np.arange(first, first + length) for length in length_R]),
        sequences=tuple(
            slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ),
        # A target is predicted from the state of the token before it.
        state_R=starts[row_R] + column_R - 1,
        target_R=batch.input_ids_BT[rows][row_R, column_R],
        soft=soft,
    )
