"""Which rows of a batch a forward pass takes: each question once, end to end where the family can.

What predicts a token sees what stands before it and nothing else. So a row needs no forward pass of its own
if other rows begin with all that stands before each of its targets, and ask there too: of two candidates of
one word one is enough, and "great" comes with "terr|ible".

Packed rows stand end to end in one sequence. Positions begin again at 0 with every row; transformers sees
that in `position_ids` (without an attention mask) and lets no row attend to another. Sentences of a task
differ in length by a factor of ten, so more than half of a padded batch is padding.

# Legend: B rows, T tokens, R targets, L tokens of all rows of a part together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permille.zo.estimators import Batch

PACKABLE = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox"})
"""Families whose models in transformers keep packed rows apart; OPT's does not tell its mask of positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one forward pass takes, and which of its tokens are asked for.

    Attributes:
        ids: int64, [B, T] padded or [1, L] packed.
        inputs: the model's other arguments that say where rows begin and end.
        target: bool, as `ids`.
    """

    ids: Tensor
    inputs: dict[str, Tensor]
    target: Tensor


def padded_parts(batch: Batch, max_tokens: int) -> Iterator[Part]:
    """Parts of the batch's rows as they are, each of at most `max_tokens` (rows times longest)."""
    rows = max(1, max_tokens // batch.input_ids_BT.shape[1])
    for first in range(0, len(batch.input_ids_BT), rows):
        some = slice(first, first + rows)
        attention_BT = torch.from_numpy(batch.attention_BT[some].astype(np.int64))
        yield Part(
            ids=torch.from_numpy(batch.input_ids_BT[some]),
            inputs={"attention_mask": attention_BT},
            target=torch.from_numpy(batch.target_BT[some]),
        )


def packed_parts(batch: Batch, max_tokens: int) -> Iterator[Part]:
    """Parts of the batch's rows end to end, in their order, each of at most `max_tokens` or of one row.

    The batch must be one of `can_pack`.
    """
    lengths_B = batch.attention_BT.sum(axis=1).tolist()
    first = 0
    while first < len(lengths_B):
        end, tokens = first + 1, lengths_B[first]
        while end < len(lengths_B) and tokens + lengths_B[end] <= max_tokens:
            tokens += lengths_B[end]
            end += 1
        attended_BT = batch.attention_BT[first:end]
        positions_L = np.concatenate([np.arange(length) for length in lengths_B[first:end]])
        yield Part(
            ids=torch.from_numpy(batch.input_ids_BT[first:end][attended_BT])[None],
            inputs={"position_ids": torch.from_numpy(positions_L)[None]},
            target=torch.from_numpy(batch.target_BT[first:end][attended_BT])[None],
        )
        first = end


def can_pack(batch: Batch) -> bool:
    """Whether every row is padded on its right alone, and none asks for its padding."""
    attention_BT = batch.attention_BT
    right = bool((attention_BT[:, 1:] <= attention_BT[:, :-1]).all()) and bool(attention_BT[:, 0].all())
    return right and not (batch.target_BT & ~attention_BT).any()


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
