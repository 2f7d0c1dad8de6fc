"""Bases that text calibrates, and the bytes of every base's stored form."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from permille.errors import InputError
from permille.package.blobs import BlobFolder
from permille.package.layers import write_dense
from permille.quantization import Scheme, dequantize, quantize, rounding
from permille_lab.evaluate.specification import Base
from permille_lab.models import storage
from tests.unit.engines.tiny import tiny_model

SEQUENCES_NT = np.random.default_rng(0).integers(1, 60, (4, 12))
SHAPES = [(64, 48), (33, 200)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model of one layer, with sides that are no multiples of 32."""
    model = tiny_model("llama", num_hidden_layers=1, intermediate_size=44)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("base", storage.ROUNDED)
def test_bytes_are_those_of_what_packages_store(base: Base) -> None:
    scheme, group_size = storage.ROUNDED[base]
    rng = np.random.default_rng(0)
    whole = [quantize(rng.normal(size=shape).astype(np.float32), scheme, group_size) for shape in SHAPES]
    found = storage.stored_bytes(base, SHAPES)
    assert found.codes == sum(tensor.packed.nbytes for tensor in whole)
    assert found.tables == sum(tensor.scales.nbytes for tensor in whole)


def test_bytes_of_unquantized_bases() -> None:
    weights = sum(rows * columns for rows, columns in SHAPES)
    sixteen = storage.stored_bytes(Base.BF16, SHAPES)
    assert (sixteen.total, sixteen.bits_per_weight) == (2 * weights, 16.0)
    assert storage.stored_bytes(Base.FLOAT32, SHAPES).bits_per_weight == 32.0


def test_masked_weights_stay_at_bf16_over_a_calibrated_base(folder: Path) -> None:
    own = storage.stored(folder, Base.BF16)
    decoded = storage.calibrated(folder, Base.AUTO_ROUND_INT4, SEQUENCES_NT, iterations=3)
    name = storage.linear_weights(own)[0]
    mask = {name: np.array([0, 7, 50], np.uint32)}
    model = storage.stored(folder, Base.AUTO_ROUND_INT4, mask, decoded)
    found, expected = (m.get_parameter(name).detach().numpy().reshape(-1).copy() for m in (model, own))
    np.testing.assert_array_equal(found[mask[name]], expected[mask[name]])
    rest = np.setdiff1d(np.arange(found.size), mask[name])
    np.testing.assert_array_equal(found[rest], decoded[name].reshape(-1)[rest])
    assert torch.equal(model.get_input_embeddings().weight, own.get_input_embeddings().weight)
    # A second model is not touched by what the first one's mask put over the codes.
    again = storage.stored(folder, Base.AUTO_ROUND_INT4, None, decoded)
    np.testing.assert_array_equal(again.get_parameter(name).detach().numpy(), decoded[name])


def test_auto_round_makes_int4_layers_as_packages_hold_them(folder: Path, tmp_path: Path) -> None:
    model = storage.stored(folder, Base.FLOAT32)
    names = storage.linear_weights(model)
    weights = {name: model.get_parameter(name).detach().numpy().copy() for name in names}
    found = rounding.rounded_int4(model, names, SEQUENCES_NT, iterations=3)
    assert list(found) == names
    decoded = storage.calibrated(folder, Base.AUTO_ROUND_INT4, SEQUENCES_NT, iterations=3)
    blobs = BlobFolder(tmp_path)
    layer = write_dense(blobs, found.items(), Scheme.INT4)
    stored = load_file(blobs.path(layer.digest))
    moved = 0
    for name, w_NK in weights.items():
        np.testing.assert_array_equal(stored[name], found[name].packed)
        np.testing.assert_array_equal(dequantize(found[name]), decoded[name])
        assert np.linalg.norm(decoded[name] - w_NK) < 0.2 * np.linalg.norm(w_NK)
        moved += int((decoded[name] != dequantize(quantize(w_NK, Scheme.INT4, 128))).sum())
    assert moved > 0  # it rounds otherwise than to the nearest
    ours, theirs = (storage.stored_bytes(base, SHAPES) for base in (Base.AUTO_ROUND_INT4, Base.INT4_G128))
    assert ours == theirs


def test_weights_that_are_no_codes_times_scales_are_refused() -> None:
    scale_NG = np.full((2, 1), 0.5, np.float32)
    w_NK = np.array([[0.5, -4.0, 3.5], [0.0, 1.0, -1.5]], np.float32)
    np.testing.assert_array_equal(dequantize(rounding._int4("w", w_NK, scale_NG)), w_NK)
    for wrong_NK in (w_NK + np.float32(0.1), w_NK * 2, w_NK * np.float32("nan")):
        with pytest.raises(InputError, match="codes times scales in w, got other weights"):
            rounding._int4("w", wrong_NK, scale_NG)
    with pytest.raises(InputError, match="a positive scale for each group of w"):
        rounding._int4("w", w_NK, -scale_NG)
    with pytest.raises(InputError, match="a positive scale for each group of w"):
        rounding._int4("w", w_NK, np.full((2, 2), 0.5, np.float32))


def test_weights_that_auto_round_leaves_out_are_not_passed_for_quantized(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Idle:
        def __init__(self, model: object, *_: object, **__: object) -> None:
            self.model = model

        def quantize(self) -> tuple[object, dict[str, object]]:
            return self.model, {}

    monkeypatch.setattr(rounding, "_library", lambda: (Idle, None))
    with pytest.raises(InputError, match="got it as it was"):
        storage.calibrated(folder, Base.AUTO_ROUND_INT4, SEQUENCES_NT)


def test_a_base_without_calibration_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"one of auto-round-int4, got nf4"):
        storage.calibrated(folder, Base.NF4, SEQUENCES_NT)
