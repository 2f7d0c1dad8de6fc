"""Tests of bases calibrated on text, and of the stored size of every base."""

from pathlib import Path

import numpy as np
import pytest
import torch

from permille.errors import InputError
from permille.quantization import quantize
from permille_lab.evaluate.specification import Base
from permille_lab.models import storage
from tests.unit.engines.tiny import tiny_model

SEQUENCES_NT = np.random.default_rng(0).integers(1, 60, (4, 12))
SHAPES = [(64, 48), (33, 200)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a model of one layer, with sizes that are not multiples of 32."""
    model = tiny_model("llama", num_hidden_layers=1, intermediate_size=44)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("base", storage.ROUNDED | storage.CALIBRATED)
def test_bytes_are_those_of_what_packages_store(base: Base) -> None:
    scheme, group_size = (storage.ROUNDED | storage.CALIBRATED)[base]
    rng = np.random.default_rng(0)
    whole = [quantize(rng.normal(size=shape).astype(np.float32), scheme, group_size) for shape in SHAPES]
    expected = sum(tensor.packed.nbytes + 4 * tensor.scales.size for tensor in whole)
    assert storage.stored_bytes(base, SHAPES) == expected


def test_bytes_of_unquantized_bases() -> None:
    weights = sum(rows * columns for rows, columns in SHAPES)
    assert storage.stored_bytes(Base.BF16, SHAPES) == 2 * weights
    assert storage.stored_bytes(Base.FLOAT32, SHAPES) == 4 * weights


def test_masked_weights_stay_at_bf16_over_a_calibrated_base(folder: Path) -> None:
    own = storage.stored(folder, Base.BF16)
    decoded = {
        name: own.get_parameter(name).detach().numpy() * np.float32(0.9)
        for name in storage.linear_weights(own)
    }
    name = storage.linear_weights(own)[0]
    mask = {name: np.array([0, 7, 50], np.uint32)}
    model = storage.stored(folder, Base.AUTO_ROUND_INT4, mask, decoded)
    found, expected = (m.get_parameter(name).detach().numpy().reshape(-1).copy() for m in (model, own))
    np.testing.assert_array_equal(found[mask[name]], expected[mask[name]])
    rest = np.setdiff1d(np.arange(found.size), mask[name])
    np.testing.assert_array_equal(found[rest], decoded[name].reshape(-1)[rest])
    assert torch.equal(model.get_input_embeddings().weight, own.get_input_embeddings().weight)
    # The first model's mask must not change a second model.
    again = storage.stored(folder, Base.AUTO_ROUND_INT4, None, decoded)
    np.testing.assert_array_equal(again.get_parameter(name).detach().numpy(), decoded[name])


def test_a_base_without_calibration_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="one of auto-round-int4, got nf4"):
        storage.calibrated(folder, Base.NF4, SEQUENCES_NT)
