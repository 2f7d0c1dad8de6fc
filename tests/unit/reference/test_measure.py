"""Bits per byte: each token once, whatever the window; the same number for models of equal probabilities."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from permille.errors import InputError
from permille_lab.reference.measure import measure


class Uniform:
    """A model that gives every one of `size` tokens the same probability, and counts what it was asked."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.size))


class Bytes:
    """A tokenizer of bytes with `<s>` = 256."""

    bos_token_id: int | None = 256

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": list(text.encode())}


@pytest.mark.parametrize("length", [1, 7, 8, 9, 50])
@pytest.mark.parametrize("context", [4, 8])
def test_every_token_counts_once(length: int, context: int) -> None:
    found = measure(Uniform(512), Bytes(), ["é" * length, "abc"], context)
    assert found.tokens == found.size_bytes == 2 * length + 3
    assert found.bits_per_byte == pytest.approx(9.0)
    assert found.loss_per_token == pytest.approx(math.log(512))


def test_a_better_model_has_fewer_bits() -> None:
    class Copies(Uniform):
        def __call__(self, input_ids: torch.Tensor) -> Any:
            logits = torch.zeros(*input_ids.shape, self.size)
            logits.scatter_(2, input_ids[..., None], math.log(3 * (self.size - 1)))  # repeats with 3 in 4
            return SimpleNamespace(logits=logits)

    same = measure(Copies(512), Bytes(), ["a" * 40], 8)
    first = math.log2(4 * 511)  # nothing to repeat before the first byte
    assert same.bits_per_byte == pytest.approx((39 * math.log2(4 / 3) + first) / 40)


def test_without_a_start_token_the_first_token_is_not_predicted() -> None:
    tokenizer = Bytes()
    tokenizer.bos_token_id = None
    assert measure(Uniform(512), tokenizer, ["abcd"], 8).tokens == 3


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(InputError, match="found none"):
        measure(Uniform(512), Bytes(), [], 8)
    with pytest.raises(InputError, match="at least 4"):
        measure(Uniform(512), Bytes(), ["abc"], 2)
