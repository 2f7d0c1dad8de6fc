"""Causal attention over packed sequences, registered with transformers under the name `PACKED`.

The projections of a layer see all tokens in one row; attention goes sequence by sequence, those of equal
length together, so that no mask over all tokens exists. Sliding windows, soft caps, scales and grouped
key-value heads come from the model's own call.

Two forms: torch's fused one, and one of plain operations for soft caps (the fused one has none) and for
forward-mode differentiation (the fused one has no rule). The plain one holds scores of some query rows at a
time, and looks at no key that is masked for all of them.

# Legend: G groups of variants, h = heads, j = key-value heads, M packed tokens, N sequences of a run, T their
# tokens, D size of a head.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

PACKED = "permille_packed"
# Scores held at a time by the plain form, tangents included: 32 MiB of float32.
_SCORES = 8 << 20


class Segments:
    """The lengths of packed sequences, and masks that all layers share."""

    def __init__(self, length_B: NDArray[np.int64], device: torch.device, *, tangents: int = 0) -> None:
        """`tangents`: directions that are differentiated along; 0 where nothing is."""
        self.tangents = tangents
        self._device = device
        self._masks: dict[tuple[int, int, int, int | None], Tensor | None] = {}
        lengths, first, counts = np.unique(length_B, return_index=True, return_counts=True)
        starts = np.cumsum(length_B) - length_B
        # Runs of equal length, in the order of packing.
        self.runs = sorted(
            (int(starts[at]), int(count), int(length))
            for length, at, count in zip(lengths, first, counts, strict=True)
        )

    def mask(self, first: int, last: int, key_first: int, window: int | None) -> Tensor | None:
        """Bool [last - first, last - key_first], true where query `first + i` sees key `key_first + j`; None
        where that is plain causality from 0 on."""
        if first == key_first == 0 and (window is None or last <= window):
            return None
        name = (first, last, key_first, window)
        if name not in self._masks:
            query = torch.arange(first, last, device=self._device)[:, None]
            key = torch.arange(key_first, last, device=self._device)
            seen = key <= query
            self._masks[name] = seen if window is None else seen & (query - key < window)
        return self._masks[name]


def packed_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """query [G, h, M, D], key and value [G, j, M, D]; returns [G, M, h, D], as transformers asks."""
    parts = []
    for start, count, length in segments.runs:
        q, k, v = (_sequences(states, start, count, length) for states in (query, key, value))
        if softcap is None and not segments.tangents:
            mixed = _fused(q, k, v, segments.mask(0, length, 0, sliding_window), scaling)
        else:
            mixed = _plain(q, k, v, segments, scaling, sliding_window, softcap)
        parts.append(mixed.transpose(1, 2).reshape(len(query), count * length, *mixed.shape[1::2]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None


AttentionInterface.register(PACKED, packed_attention)


def _sequences(states: Tensor, start: int, count: int, length: int) -> Tensor:
    """[G, heads, M, D] to [G * count, heads, length, D]."""
    run = states[:, :, start : start + count * length].transpose(1, 2)
    return run.reshape(-1, length, *run.shape[2:]).transpose(1, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def _plain(
    q_NhTD: Tensor,
    k_NjTD: Tensor,
    v_NjTD: Tensor,
    segments: Segments,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[N, h, T, D]."""
    sequences, heads, length = q_NhTD.shape[:3]
    copies = 1 + segments.tangents
    rows = max(1, min(length, _SCORES // (heads * length * copies)))
    together = max(1, _SCORES // (heads * length * rows * copies)) if rows == length else 1
    mixed = []
    for n in range(0, sequences, together):
        q, k, v = (states[n : n + together] for states in (q_NhTD, k_NjTD, v_NjTD))
        blocks = []
        for first, last, key_first in _query_blocks(length, rows, window):
            seen = segments.mask(first, last, key_first, window)
            if seen is None:
                seen = torch.ones(last, last, dtype=torch.bool, device=q.device).tril()
            keys = slice(key_first, last)
            blocks.append(_scored(q[:, :, first:last], k[:, :, keys], v[:, :, keys], seen, scaling, softcap))
        mixed.append(torch.cat(blocks, dim=2))
    return torch.cat(mixed)


def _query_blocks(length: int, rows: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first query, last query, first key that any of them sees)."""
    for first in range(0, length, rows):
        yield first, min(first + rows, length), 0 if window is None else max(0, first - window + 1)


def _scored(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Softmax attention of some queries [N, h, S, D] on keys [N, j, T, D] where `seen` [S, T]."""
    heads, queries = q.shape[1:3]
    shared = heads // k.shape[1]
    # The queries of the heads that share a key are rows of one product: keys are not repeated.
    folded = q.reshape(len(q), k.shape[1], shared * queries, -1)
    score = (folded @ k.transpose(2, 3) * scaling).to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.view(*score.shape[:2], shared, queries, -1).masked_fill(~seen, -torch.inf)
    probability = torch.softmax(score, dim=-1).to(v.dtype).flatten(2, 3)
    return (probability @ v).reshape(len(q), heads, queries, -1)
