"""Tests of auto-round: its int4 fits packages, and layers that it omits are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from permille.errors import InputError
from permille.models.families import scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.layers import write_dense
from permille.package.manifest import Quantization
from permille.quantization import dequantize, quantize, rounding
from permille.quantization.types import Scheme
from tests.unit.engines.tiny import tiny_model

SEQUENCES_NT = np.random.default_rng(0).integers(1, 60, (4, 12))


def model_of_one_layer() -> Any:
    """Return a model with sizes that are not multiples of 32."""
    return tiny_model("llama", num_hidden_layers=1, intermediate_size=44)


def linear_weights(model: Any) -> list[str]:
    return [name for name, _ in scoped_tensors(model.config.to_dict(), "all")]


def test_auto_round_makes_int4_layers_as_packages_hold_them(tmp_path: Path) -> None:
    model = model_of_one_layer()
    names = linear_weights(model)
    weights = {name: model.get_parameter(name).detach().numpy().copy() for name in names}
    found = rounding.rounded_int4(model, names, SEQUENCES_NT, iterations=3)
    assert list(found) == names
    blobs = BlobFolder(tmp_path)
    layer = write_dense(blobs, found.items(), Quantization(name=Scheme.INT4, group_size=128))
    stored = load_file(blobs.path(layer.digest))
    moved = 0
    for name, w_NK in weights.items():
        np.testing.assert_array_equal(stored[name], found[name].packed)
        decoded_NK = dequantize(found[name])
        assert np.linalg.norm(decoded_NK - w_NK) < 0.2 * np.linalg.norm(w_NK)
        moved += int((decoded_NK != dequantize(quantize(w_NK, Scheme.INT4, 128))).sum())
    assert moved > 0  # auto-round does not always round to the nearest code


def test_weights_that_are_no_codes_times_scales_are_refused() -> None:
    scale_NG = np.full((2, 1), 0.5, np.float32)
    w_NK = np.array([[0.5, -4.0, 3.5], [0.0, 1.0, -1.5]], np.float32)
    np.testing.assert_array_equal(dequantize(rounding._int4("w", w_NK, scale_NG)), w_NK)
    for wrong_NK in (w_NK + np.float32(0.1), w_NK * 2, w_NK * np.float32("nan")):
        with pytest.raises(InputError, match="not codes times scales"):
            rounding._int4("w", wrong_NK, scale_NG)
    with pytest.raises(InputError, match="auto-round gave w scales"):
        rounding._int4("w", w_NK, -scale_NG)
    with pytest.raises(InputError, match="auto-round gave w scales"):
        rounding._int4("w", w_NK, np.full((2, 2), 0.5, np.float32))


def test_weights_that_auto_round_leaves_out_are_not_passed_for_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Idle:
        def __init__(self, model: object, *_: object, **__: object) -> None:
            self.model = model

        def quantize(self) -> tuple[object, dict[str, object]]:
            return self.model, {}

    monkeypatch.setattr(rounding, "_library", lambda: (Idle, None))
    with pytest.raises(InputError, match="did not change"):
        model = model_of_one_layer()
        rounding.rounded_int4(model, linear_weights(model), SEQUENCES_NT)
