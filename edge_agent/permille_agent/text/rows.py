"""Rows of up to T tokens for training steps and evaluations.

- A training row packs several short documents together, which avoids padding. If a text begins with BOS, the
  documents of a row are sequences of their own: none attends to another.
- An evaluation row has tokens of one document, so that its loss does not depend on other documents.
- The first token of a document is a target only after BOS. Otherwise, nothing or another document would
  predict it.
- A row that begins inside a document begins as a text in use does (`permille.beginnings`).
- The batch of a step is a pure function of the rows, the seed and the step. So a resumed run reads the same
  batches.

Shapes: T tokens, B rows of a batch, N targets.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from permille.beginnings import row_spans
from permille.zo.estimators import Batch
from permille_agent.text.tokens import TokenizedDocument


@dataclass(frozen=True, slots=True)
class Row:
    """Up to T tokens without padding.

    `document_T` has the index of each token's document. `begun` is True if each sequence of the row begins
    with BOS. `breaks` are the positions where another sequence of the row begins.
    """

    ids_T: NDArray[np.int64]
    target_T: NDArray[np.bool_]
    bytes_T: NDArray[np.int64]
    document_T: NDArray[np.int64]
    begun: bool = False
    breaks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationBatch:
    """A batch with the document and the number of bytes of each target, in row-major order."""

    batch: Batch
    document_N: NDArray[np.int64]
    bytes_N: NDArray[np.int64]


def document_rows(documents: Sequence[TokenizedDocument], row_tokens: int, *, first: int = 0) -> list[Row]:
    """Cut documents into rows with tokens of one document each. Rows without a target are dropped.

    Args:
        documents: the documents.
        row_tokens: length of the longest row.
        first: index of the first document.
    """
    rows = []
    for index, document in enumerate(documents, start=first):
        for span in row_spans(len(document.ids_T), row_tokens, document.bos):
            row = _row(document, index, *span)
            # A row without a target has no loss, and would only cost time.
            if row.target_T.any():
                rows.append(row)
    return rows


def rows_in_pieces(rows: Sequence[Row], tokens: int) -> list[Row]:
    """Divide each row into equal pieces of about `tokens` targets.

    In the returned rows, `document_T` has the index of each token's piece.
    """
    found, before = [], 0
    for row in rows:
        targets = int(row.target_T.sum())
        pieces = max(1, round(targets / tokens))
        # Position of each target among the row's targets, from 0. Other tokens count with the next target.
        number_T: NDArray[np.int64] = np.cumsum(row.target_T) - row.target_T
        found.append(replace(row, document_T=before + np.minimum(number_T * pieces // targets, pieces - 1)))
        before += pieces
    return found


def rows_in_groups(rows: Sequence[Row], tokens: int) -> list[Row]:
    """Divide the targets of all rows into groups of `tokens` neighbours.

    The last group also has the remainder. In the returned rows, `document_T` has the index of each token's
    group.
    """
    groups = max(1, sum(int(row.target_T.sum()) for row in rows) // tokens)
    found, before = [], 0
    for row in rows:
        number_T = before + np.cumsum(row.target_T) - row.target_T
        found.append(replace(row, document_T=np.minimum(number_T // tokens, groups - 1)))
        before += int(row.target_T.sum())
    return found


def packed_rows(documents: Sequence[TokenizedDocument], row_tokens: int) -> list[Row]:
    """Pack the rows of `document_rows` into fewer rows, by best fit in decreasing length."""
    pieces = document_rows(documents, row_tokens)
    bins: list[list[Row]] = []
    bins_by_free: list[list[int]] = [[] for _ in range(row_tokens + 1)]
    # Place pieces by decreasing length. The index breaks ties, so the packing is always the same.
    for index in sorted(range(len(pieces)), key=lambda i: (-len(pieces[i].ids_T), i)):
        length = len(pieces[index].ids_T)
        # Choose the fullest row that still has room.
        free = next((free for free in range(length, row_tokens + 1) if bins_by_free[free]), None)
        if free is None:
            place, free = len(bins), row_tokens
            bins.append([])
        else:
            place = bins_by_free[free].pop()
        bins[place].append(pieces[index])
        bins_by_free[free - length].append(place)
    return [_joined(parts) for parts in bins]


class TrainingBatches:
    """Batches of a run. Each epoch has every row once, in an order that the seed and the epoch decide.

    For example, the batch of the first step:

        batches = TrainingBatches(prepared.train, batch_rows=4, seed=0)
        batch = batches(0)
    """

    def __init__(self, rows: Sequence[Row], *, batch_rows: int, seed: int) -> None:
        self._rows = rows
        self._batch_rows = min(batch_rows, len(rows))
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def __call__(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0."""
        first = step * self._batch_rows
        chosen = [self._row(position) for position in range(first, first + self._batch_rows)]
        return batch_of(chosen)

    def tokens(self, steps: int) -> int:
        """Count the tokens of the first `steps` steps, without padding."""
        total = sum(len(row.ids_T) for row in self._rows)
        epochs, rest = divmod(steps * self._batch_rows, len(self._rows))
        return epochs * total + sum(len(self._rows[i].ids_T) for i in self._order(epochs)[:rest])

    def _row(self, position: int) -> Row:
        epoch, place = divmod(position, len(self._rows))
        return self._rows[self._order(epoch)[place]]

    def _epoch_order(self, epoch: int) -> list[int]:
        def key(row: int) -> bytes:
            return hashlib.blake2b(
                f"permille-order-1\0{self._seed}\0{epoch}\0{row}".encode(), digest_size=16
            ).digest()

        return sorted(range(len(self._rows)), key=key)


def evaluation_batches(rows: Sequence[Row], *, tokens: int) -> Iterator[EvaluationBatch]:
    """Yield batches of at most `tokens` positions. Rows of similar length share a batch."""
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].ids_T), i))
    start = 0
    while start < len(order):
        longest = len(rows[order[start]].ids_T)
        size = max(1, tokens // longest)
        chosen = [rows[i] for i in order[start : start + size]]
        start += size
        yield EvaluationBatch(
            batch_of(chosen),
            np.concatenate([row.document_T[row.target_T] for row in chosen]),
            np.concatenate([row.bytes_T[row.target_T] for row in chosen]),
        )


def batch_of(rows: Sequence[Row]) -> Batch:
    """Make a batch of rows. Shorter sequences are padded on the right with id 0."""
    pairs = zip(
        (ids_T for row in rows for ids_T in np.split(row.ids_T, row.breaks)),
        (target_T for row in rows for target_T in np.split(row.target_T, row.breaks)),
        strict=True,
    )
    sequences = list(pairs)
    shape = (len(sequences), max(len(ids_T) for ids_T, _ in sequences))
    input_ids_BT = np.zeros(shape, dtype=np.int64)
    attention_BT = np.zeros(shape, dtype=np.bool_)
    target_BT = np.zeros(shape, dtype=np.bool_)
    for index, (ids_T, target_T) in enumerate(sequences):
        input_ids_BT[index, : len(ids_T)] = ids_T
        attention_BT[index, : len(ids_T)] = True
        target_BT[index, : len(ids_T)] = target_T
    return Batch(input_ids_BT=input_ids_BT, attention_BT=attention_BT, target_BT=target_BT)


def rows_digest(parts: Sequence[Sequence[Row]]) -> str:
    """Return the digest of the ids, targets and documents of all rows of all splits."""
    digest = hashlib.sha256(b"permille-rows-1\0")
    for rows in parts:
        digest.update(len(rows).to_bytes(8, "little"))
        for row in rows:
            digest.update(len(row.ids_T).to_bytes(8, "little"))
            digest.update(row.ids_T.astype("<i8").tobytes())
            digest.update(row.target_T.astype("u1").tobytes())
            digest.update(row.document_T.astype("<i8").tobytes())
            # Without BOS, the digest is that of earlier versions.
            if row.begun:
                digest.update(np.array([len(row.breaks), *row.breaks], "<i8").tobytes())
    return f"sha256:{digest.hexdigest()}"


def _row(document: TokenizedDocument, index: int, context: int, first: int, last: int) -> Row:
    bos_S = np.array(document.bos, np.int64)
    nothing_S = np.zeros(len(bos_S), np.int64)
    ids_T = np.concatenate([bos_S, document.ids_T[context:last]])
    target_T = np.concatenate([nothing_S.astype(np.bool_), document.target_T[context:last]])
    target_T[: len(bos_S) + first - context] = False
    target_T[:1] = False
    bytes_T = np.concatenate([nothing_S, document.bytes_T[context:last]])
    document_T = np.full(len(ids_T), index, dtype=np.int64)
    return Row(ids_T, target_T, bytes_T, document_T, begun=bool(document.bos))


def _joined(parts: Sequence[Row]) -> Row:
    """Join rows end to end. If they begin with BOS, each remains a sequence of its own."""
    if len(parts) == 1:
        return parts[0]
    apart = parts[0].begun
    lengths = np.cumsum([len(part.ids_T) for part in parts[:-1]])
    return Row(
        np.concatenate([part.ids_T for part in parts]),
        np.concatenate([part.target_T for part in parts]),
        np.concatenate([part.bytes_T for part in parts]),
        np.concatenate([part.document_T for part in parts]),
        begun=apart,
        breaks=tuple(lengths.tolist()) if apart else (),
    )
