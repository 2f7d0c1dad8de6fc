"""Inputs of forward passes for the rows of a batch: packed if the model family allows it, else padded.

Packed rows form one sequence, and the positions of each row start at 0. Transformers recognises the rows by
`position_ids`, if there is no attention mask, and does not let one row attend to another. Padding would waste
time: lengths of a task's sentences differ by a factor of ten, so more than half of a batch would be padding.

# Legend: B rows, T tokens, L tokens of all rows of a part together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from permille.zo.estimators import Batch

PACKABLE = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox"})
"""Families whose models in transformers separate packed rows. OPT does not pass positions to its mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """The input of one forward pass.

    Attributes:
        ids: token ids, int64, [B, T] padded or [1, L] packed.
        inputs: further arguments of the model: `attention_mask` or `position_ids`.
        target: True for each target token, bool, in the shape of `ids`.
    """

    ids: Tensor
    inputs: dict[str, Tensor]
    target: Tensor


def padded_parts(batch: Batch, max_tokens: int) -> Iterator[RowPart]:
    """Yield parts of the padded batch. A part has at most `max_tokens`, padding included, or one row."""
    rows = max(1, max_tokens // batch.input_ids_BT.shape[1])
    for first in range(0, len(batch.input_ids_BT), rows):
        some = slice(first, first + rows)
        attention_BT = torch.from_numpy(batch.attention_BT[some].astype(np.int64))
        yield RowPart(
            ids=torch.from_numpy(batch.input_ids_BT[some]),
            inputs={"attention_mask": attention_BT},
            target=torch.from_numpy(batch.target_BT[some]),
        )


def packed_parts(batch: Batch, max_tokens: int) -> Iterator[RowPart]:
    """Yield parts of packed rows, in their order. A part has at most `max_tokens` or one row.

    `can_pack` must be True for the batch.
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
        yield RowPart(
            ids=torch.from_numpy(batch.input_ids_BT[first:end][attended_BT])[None],
            inputs={"position_ids": torch.from_numpy(positions_L)[None]},
            target=torch.from_numpy(batch.target_BT[first:end][attended_BT])[None],
        )
        first = end


def can_pack(batch: Batch) -> bool:
    """Return True if rows have padding only on the right, and no target is padding."""
    attention_BT = batch.attention_BT
    right = bool((attention_BT[:, 1:] <= attention_BT[:, :-1]).all()) and bool(attention_BT[:, 0].all())
    return right and not (batch.target_BT & ~attention_BT).any()
