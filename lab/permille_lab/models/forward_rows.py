"""Batches for forward passes: rows stand end to end where the family allows it, else they are padded.

Packed rows stand end to end in one sequence. Positions begin again at 0 with every row. Transformers sees
that in `position_ids` (without an attention mask) and lets no row attend to another. Sentences of a task
differ in length by a factor of ten, so more than half of a padded batch is padding.

# Legend: B rows, T tokens, L tokens of all rows of a part together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from permille.zo.estimators import Batch

PACKABLE = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox"})
"""Families whose models in transformers keep packed rows apart; OPT's does not tell its mask of positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """The input of one forward pass, with the tokens that are asked for.

    Attributes:
        ids: int64, [B, T] padded or [1, L] packed.
        inputs: the model's other arguments that say where rows begin and end.
        target: bool, as `ids`.
    """

    ids: Tensor
    inputs: dict[str, Tensor]
    target: Tensor


def padded_parts(batch: Batch, max_tokens: int) -> Iterator[RowPart]:
    """Yield parts of the batch's rows as they are, each of at most `max_tokens` (rows times longest)."""
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
        yield RowPart(
            ids=torch.from_numpy(batch.input_ids_BT[first:end][attended_BT])[None],
            inputs={"position_ids": torch.from_numpy(positions_L)[None]},
            target=torch.from_numpy(batch.target_BT[first:end][attended_BT])[None],
        )
        first = end


def can_pack(batch: Batch) -> bool:
    """Return True if every row is padded on its right alone, and none asks for its padding."""
    attention_BT = batch.attention_BT
    right = bool((attention_BT[:, 1:] <= attention_BT[:, :-1]).all()) and bool(attention_BT[:, 0].all())
    return right and not (batch.target_BT & ~attention_BT).any()
