"""The quantizer table: what is measured of a base, and what its rows say."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.errors import InputError
from permille.quantization.perplexity import perplexity
from permille_lab.benchmarks.cells import Cells
from permille_lab.benchmarks.quantizers import CASES, FIGURE, page, settings_of
from permille_lab.evaluate import models
from permille_lab.evaluate.quantizers import HeldOut, held_out, markdown, measure
from permille_lab.evaluate.schemes import stored_bytes
from permille_lab.evaluate.specification import Base
from tests.unit.engines.tiny import tiny_model

WINDOWS_NT = np.random.default_rng(1).integers(1, 60, (5, 16))
CALIBRATION_NT = np.random.default_rng(0).integers(1, 60, (4, 12))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_base_is_measured_on_every_window(folder: Path) -> None:
    texts = {"a": HeldOut(windows_NT=WINDOWS_NT, tokens_per_byte=0.25)}
    found = measure(folder, Base.BF16, CALIBRATION_NT, texts)
    model = models.stored(folder, Base.BF16)
    assert found["texts"]["a"]["tokens_per_byte"] == 0.25
    whole = perplexity(model, WINDOWS_NT)["loss"]
    assert np.mean(found["texts"]["a"]["losses"]) == pytest.approx(whole, abs=1e-5)
    shapes = [tuple(model.get_parameter(name).shape) for name in models.linear_weights(model)]
    assert found["bytes"] == stored_bytes(Base.BF16, [(rows, columns) for rows, columns in shapes]).total


@pytest.mark.parametrize("base", [Base.NF4, Base.SQUEEZELLM])
def test_four_bits_cost_something(folder: Path, base: Base) -> None:
    texts = {"a": HeldOut(windows_NT=WINDOWS_NT, tokens_per_byte=0.25)}
    four = measure(folder, base, CALIBRATION_NT, texts)
    sixteen = measure(folder, Base.BF16, CALIBRATION_NT, texts)
    assert four["texts"]["a"]["losses"] != sixteen["texts"]["a"]["losses"]
    assert 4 < four["bits_per_weight"] < sixteen["bits_per_weight"] == 16


def record(losses: list[float], *, size: int = 1_000_000) -> dict[str, Any]:
    texts = {"t": {"tokens_per_byte": 0.5, "losses": losses}}
    return {"weights": 10, "bytes": size, "bits_per_weight": 4.5, "texts": texts}


def test_rows_say_perplexity_bits_per_byte_and_the_paired_difference() -> None:
    table = markdown(
        {Base.BF16: record([1.0, 3.0]), Base.NF4: record([1.1, 3.3], size=2_500_000)}, {"t": "held out"}
    )
    *_, sixteen, four = table.splitlines()
    assert f"| {math.exp(2):.3f} | {2 / math.log(2) * 0.5:.4f} |" in sixteen
    assert "2.500 | t (held out)" in four
    # Differences 0.1 and 0.3: mean 0.2, standard error 0.1.
    assert "+0.2000 ± 0.1000" in four


def test_rows_without_16_bits_or_on_other_texts_are_refused() -> None:
    with pytest.raises(InputError, match="16-bit weights among them"):
        markdown({Base.NF4: record([1.0, 2.0])})
    other = record([1.0, 2.0])
    other["texts"]["u"] = other["texts"]["t"]
    with pytest.raises(InputError, match="same texts"):
        markdown({Base.BF16: record([1.0, 2.0]), Base.NF4: other})


class Letters:
    """A token a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_held_out_windows_follow_those_of_calibration() -> None:
    texts = ["abcdefgh", "ijklmnop", "äöüß"]
    found = held_out(Letters(), texts, 2, 4, skip=2)
    assert found.tokens_per_byte == 20 / 24
    assert not set("abcdefgh") & {chr(token) for token in found.windows_NT.reshape(-1)}


def test_the_page_shows_models_whose_16_bits_are_measured(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.jsonl")
    small, other = CASES
    texts = {name: {"tokens_per_byte": 0.5, "losses": [1.0, 2.0]} for name in small.held_out}
    whole = record([]) | {"texts": texts}
    cells.once(FIGURE, settings_of(small, Base.NF4), lambda: whole)
    assert "##" not in page(cells)
    cells.once(FIGURE, settings_of(small, Base.BF16), lambda: whole)
    text = page(cells)
    assert f"## {small.model}, calibrated on {small.calibration}" in text
    assert other.model not in text
    # In the order of the bases, whatever was measured first.
    assert text.index("| bf16 |") < text.index("| nf4 |")
