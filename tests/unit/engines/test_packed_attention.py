"""Attention over packed sequences against each sequence alone, written out."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from permille.engines import packed_attention as module
from permille.engines.packed_attention import Segments, packed_attention

LENGTHS = np.array([7, 7, 5, 2, 2, 2, 1])
GROUPS, HEADS, KEY_HEADS, SIZE = 3, 4, 2, 8


def states(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = int(LENGTHS.sum())
    q, k, v = (
        torch.randn(GROUPS, heads, tokens, SIZE, dtype=dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    return q, k, v


def alone(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    """[G, M, h, D]: each sequence and head by itself, in float64."""
    out = torch.empty_like(q).transpose(1, 2)
    ends = np.cumsum(LENGTHS).tolist()
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        for head in range(HEADS):
            shared = head // (HEADS // KEY_HEADS)
            score = q[:, head, start:stop] @ k[:, shared, start:stop].transpose(1, 2) * scaling
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            hidden = (distance < 0) | (distance >= (window or 100))
            score = score.masked_fill(hidden, -torch.inf)
            out[:, start:stop, head] = torch.softmax(score, -1) @ v[:, shared, start:stop]
    return out


@pytest.mark.parametrize("scores", [1, 60, 1 << 20], ids=lambda scores: f"{scores}_scores_at_a_time")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("tangents", [0, 2])
def test_packed_sequences_are_sequences_alone(
    monkeypatch: pytest.MonkeyPatch, tangents: int, window: int | None, softcap: float | None, scores: int
) -> None:
    monkeypatch.setattr(module, "_SCORES", scores)
    q, k, v = states()
    segments = Segments(LENGTHS, torch.device("cpu"), tangents=tangents)
    got, _ = packed_attention(
        nn.Identity(), q, k, v, None, segments=segments, scaling=0.3, sliding_window=window, softcap=softcap
    )
    torch.testing.assert_close(got, alone(q, k, v, 0.3, window, softcap), rtol=1e-9, atol=1e-9)


def test_one_length_needs_no_copy_of_the_sequences() -> None:
    q = torch.randn(1, 12, HEADS, SIZE).transpose(1, 2)
    run = module._sequences(q, 0, 3, 4)
    assert run.shape == (3, HEADS, 4, SIZE)
    assert run.data_ptr() == q.data_ptr()


def test_no_score_is_held_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SCORES", 64)
    sizes: list[int] = []
    original = module._scored

    def noting(q: Tensor, k: Tensor, *rest: object) -> Tensor:
        sizes.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return original(q, k, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_scored", noting)
    q, k, v = states()
    segments = Segments(LENGTHS, torch.device("cpu"), tangents=1)
    packed_attention(nn.Identity(), q, k, v, None, segments=segments, scaling=1.0)
    assert max(sizes) * 2 <= 64
    assert sum(sizes) < GROUPS * HEADS * int((LENGTHS**2).sum())  # Masked keys are not even looked at.
