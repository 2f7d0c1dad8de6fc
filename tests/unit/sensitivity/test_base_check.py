"""Tests of the check of a base: which of three ways of beginning a row the model reads best."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from permille.models.checkpoint import Checkpoint
from permille.models.layerwise import LayerStream
from permille.models.loading import load_model
from permille.sensitivity.base_check import BaseLosses, check_base, remarks
from permille.sensitivity.streamed import StreamedModel
from tests.tiny_model import write_model

BOS = 9


class _Counter(torch.nn.Module):
    """A model of ten tokens that predicts "one more than the last token", if a row begins as it expects."""

    def __init__(self, *, wants_bos: bool) -> None:
        super().__init__()
        self.wants_bos = wants_bos
        self.device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        logits = torch.nn.functional.one_hot((input_ids + 1) % BOS, 10).float()
        reads = bool(input_ids[0, 0] == BOS) == self.wants_bos
        return SimpleNamespace(logits=logits * (12.0 if reads else 0.0))


def _rows(*, begun: bool) -> np.ndarray:
    rows = np.array([[(start + place) % BOS for place in range(12)] for start in range(200)])
    return np.insert(rows, 0, BOS, axis=1) if begun else rows


@pytest.mark.parametrize(
    ("wants_bos", "begun", "said"),
    [
        (True, False, ["better after BOS"]),  # the fault that a Gemma package had
        (False, True, ["better without their first token"]),
        (True, True, []),
        (False, False, []),
    ],
)
def test_another_beginning_that_the_model_reads_better_is_said(
    wants_bos: bool, begun: bool, said: list[str]
) -> None:
    model = cast(Any, _Counter(wants_bos=wants_bos).eval())
    found = [*remarks(check_base(model, _rows(begun=begun), bos=BOS))]
    assert [any(words in remark for remark in found) for words in said] == [True] * len(said)
    assert len(found) == (
        2 if said else 0
    )  # without its beginning, the model knows nothing: the loss is high


def test_rows_that_begin_with_bos_are_not_measured_after_a_second_one() -> None:
    model = cast(Any, _Counter(wants_bos=True).eval())
    assert check_base(model, _rows(begun=True), bos=BOS)["after_bos"] is None
    assert check_base(model, _rows(begun=False), bos=None)["after_bos"] is None


def test_a_loss_near_that_of_token_frequencies_is_said_to_be_high() -> None:
    losses = BaseLosses(loss=5.5, without_first=5.5, after_bos=5.5, unigram_entropy=6.0)
    assert "unusually high: 5.50" in next(remarks(losses))
    assert not [*remarks({**losses, "loss": 3.6, "without_first": 3.7, "after_bos": 3.6})]


def test_a_streamed_model_gives_the_same_losses(tmp_path: Any) -> None:
    folder = write_model(tmp_path / "model")
    rows_NT = np.random.default_rng(0).integers(0, 60, (3, 9))
    whole = check_base(load_model(folder), rows_NT, bos=1)
    stream = LayerStream(Checkpoint(folder), dtype=torch.float32, device=torch.device("cpu"))
    parts = check_base(StreamedModel(stream=stream, hidden_bytes=1 << 20), rows_NT, bos=1)
    assert parts == pytest.approx(whole, abs=1e-5)
