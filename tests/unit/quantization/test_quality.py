"""Tests of a quantization's report: reconstruction errors and perplexity."""

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch

from permille.errors import InputError
from permille.models.families import scoped_tensors
from permille.quantization import dequantize, quantize
from permille.quantization.perplexity import apply_quantized, perplexity
from permille.quantization.report import ErrorReport
from permille.quantization.types import Scheme
from tests.unit.engines.tiny import tiny_model


def tiny() -> Any:
    """Return a tiny model. Its predictions differ enough from uniform ones to show quantization errors."""
    return tiny_model("llama")


SEQUENCES = np.random.default_rng(0).integers(0, 40, (4, 17))


def test_perplexity_is_the_exponential_of_transformers_own_mean_loss() -> None:
    model = tiny()
    losses = [model(input_ids=ids, labels=ids).loss.item() for ids in torch.from_numpy(SEQUENCES)[:, None]]
    result = perplexity(model, SEQUENCES)
    assert result["tokens"] == 4 * 16
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert result["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)


def test_perplexity_refuses_a_loss_that_is_not_finite_and_nothing_to_predict() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(InputError, match="The loss of sequence 0 is not finite"):
        perplexity(model, SEQUENCES)
    with pytest.raises(InputError, match="at least 2 tokens"):
        perplexity(model, SEQUENCES[:, :1])


@pytest.mark.parametrize(("scheme", "group_size"), [(Scheme.NF4, 64), (Scheme.INT4, 32)])
def test_the_model_computes_with_decoded_weights(scheme: Scheme, group_size: int) -> None:
    model = tiny()
    names = [name for name, _ in scoped_tensors(model.config.to_dict())]
    quantized = {
        name: quantize(model.get_parameter(name).detach().numpy(), scheme, group_size) for name in names
    }
    before = perplexity(model, SEQUENCES)
    apply_quantized(model, quantized.items())
    for name, tensor in quantized.items():
        assert np.array_equal(model.get_parameter(name).detach().numpy(), dequantize(tensor))
    assert perplexity(model, SEQUENCES)["loss"] != before["loss"]


def test_error_is_the_relative_frobenius_norm_of_the_difference() -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((8, 96)).astype(np.float32) for name in ("a", "b")}
    decoded = {name: dequantize(quantize(w_NK, Scheme.INT4, 32)) for name, w_NK in weights.items()}
    report = ErrorReport()
    for name, w_NK in weights.items():
        report.add(name, w_NK, decoded[name])
    summary = report.summary()
    difference = np.stack([weights[name].astype(np.float64) - decoded[name] for name in weights])
    whole = np.stack(list(weights.values()))
    errors = [summary["relative_error"], *(row["relative_error"] for row in summary["tensors"])]
    parts = [(difference, whole), *zip(difference, whole, strict=True)]
    assert errors == pytest.approx([np.linalg.norm(part) / np.linalg.norm(of) for part, of in parts])
    assert summary["max_error"] == pytest.approx(np.abs(difference).max())
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_a_weight_of_zeros_has_no_error() -> None:
    zeros = np.zeros((2, 64), np.float32)
    report = ErrorReport()
    report.add("a", zeros, zeros)
    assert report.summary()["relative_error"] == report.summary()["tensors"][0]["relative_error"] == 0


def test_a_tensor_that_the_model_lacks_or_has_in_another_shape_is_refused() -> None:
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    quantized = quantize(np.ones((2, 64), np.float32), Scheme.NF4, 64)
    with pytest.raises(InputError, match=r"layers.9: expected a weight .2, 64. in the model, got None"):
        apply_quantized(model, [("layers.9", quantized)])
    with pytest.raises(InputError, match="expected a weight"):
        apply_quantized(model, [("model.layers.0.self_attn.q_proj.weight", quantized)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
