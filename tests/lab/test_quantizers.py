"""Tests of the quantizer table: the measurements of a base, and the table's rows."""

from pathlib import Path

import numpy as np
import pytest

from permille.quantization.perplexity import perplexity
from permille_lab.evaluate.specification import Base
from permille_lab.measuring.cells import Cells
from permille_lab.models import storage
from permille_lab.quantization.__main__ import CASES, HeldOut, measure, settings_of
from permille_lab.quantization.page import tables
from tests.unit.engines.tiny import tiny_model

WINDOWS_NT = np.random.default_rng(1).integers(1, 60, (5, 16))
CALIBRATION_NT = np.random.default_rng(0).integers(1, 60, (4, 12))
TEXTS = {"a": HeldOut(windows_NT=WINDOWS_NT, tokens_per_byte=0.25)}


def test_a_base_is_measured_on_every_window(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("llama", num_hidden_layers=1).save_pretrained(folder)
    sixteen = measure(folder, Base.BF16, CALIBRATION_NT, TEXTS)
    model = storage.stored(folder, Base.BF16)
    whole = perplexity(model, WINDOWS_NT)["loss"]
    assert np.mean(sixteen["texts"]["a"]["losses"]) == pytest.approx(whole, abs=1e-5)
    shapes = [tuple(model.get_parameter(name).shape) for name in storage.linear_weights(model)]
    assert sixteen["bytes"] == storage.stored_bytes(Base.BF16, [(n, k) for n, k in shapes])
    four = measure(folder, Base.NF4, CALIBRATION_NT, TEXTS)
    assert four["texts"]["a"]["losses"] != sixteen["texts"]["a"]["losses"]
    assert 4 < four["bits_per_weight"] < sixteen["bits_per_weight"] == 16


def test_rows_say_bits_per_byte_and_the_paired_difference(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "quantizers.jsonl")
    for base, losses in ((Base.BF16, [1.0, 3.0]), (Base.NF4, [1.1, 3.3])):
        texts = {"t": {"tokens_per_byte": 0.5, "losses": losses}}
        result = {"weights": 10, "bytes": 5, "bits_per_weight": 4.5, "texts": texts}
        cells.keep("quantizers", settings_of(CASES[0], base), result)
    sixteen, four = tables(tmp_path)["bases"].splitlines()[2:]
    assert f"{2 / np.log(2) * 0.5:.4f}" in sixteen and "±" not in sixteen
    assert "+0.2000 ± 0.1000" in four  # differences 0.1 and 0.3: mean 0.2, standard error 0.1
