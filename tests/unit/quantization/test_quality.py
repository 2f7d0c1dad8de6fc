"""Reconstruction errors and perplexity: what a quantization's report says."""

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from permille.errors import InputError
from permille.models.families import scoped_tensors
from permille.quantization import Scheme, dequantize, quantize
from permille.quantization.perplexity import apply_quantized, perplexity
from permille.quantization.report import error_of, keep_of
from permille.sensitivity.masks import MaskMethod, select_mask


def tiny() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # far enough from uniform that quantization shows
    return model


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
    with pytest.raises(InputError, match="sequence 0: expected a finite loss"):
        perplexity(model, SEQUENCES)
    with pytest.raises(InputError, match="at least 2 tokens"):
        perplexity(model, SEQUENCES[:, :1])


@pytest.mark.parametrize(("scheme", "group_size"), [(Scheme.NF4, 64), (Scheme.INT4, 32)])
def test_the_model_computes_with_decoded_weights_and_its_own_values_at_the_mask(
    scheme: Scheme, group_size: int
) -> None:
    model, source = tiny(), tiny()
    names = [name for name, _ in scoped_tensors(model.config.to_dict())]
    weights = {name: source.get_parameter(name).detach().numpy() for name in names}
    mask = select_mask(weights, MaskMethod.MAGNITUDE, 0.05)
    quantized = {
        name: quantize(w, scheme, group_size, keep_of(mask[name], (w.shape[0], w.shape[1])))
        for name, w in weights.items()
    }
    before = perplexity(model, SEQUENCES)
    summary = apply_quantized(model, quantized.items(), mask)
    for name, w_NK in weights.items():
        effective = model.get_parameter(name).detach().numpy().reshape(-1)
        assert (effective[mask[name]] == w_NK.reshape(-1)[mask[name]]).all()
        rest = np.ones(effective.size, bool)
        rest[mask[name]] = False
        assert (effective[rest] == dequantize(quantized[name]).reshape(-1)[rest]).all()
    assert perplexity(model, SEQUENCES)["loss"] != before["loss"]
    assert summary == error_of((name, weights[name], quantized[name], mask[name]) for name in names)


def test_error_is_the_relative_frobenius_norm_of_what_a_layer_computes_with() -> None:
    w_NK = np.random.default_rng(0).standard_normal((8, 96)).astype(np.float32)
    indices = np.array([0, 5, 700], np.uint32)
    quantized = quantize(w_NK, Scheme.INT4, 32)
    effective = dequantize(quantized).reshape(-1)
    effective[indices] = w_NK.reshape(-1)[indices]
    difference = w_NK.reshape(-1).astype(np.float64) - effective
    report = error_of([("a", w_NK, quantized, indices)])
    assert report["tensors"][0]["relative_error"] == pytest.approx(
        np.linalg.norm(difference) / np.linalg.norm(w_NK)
    )
    assert report["max_error"] == pytest.approx(np.abs(difference).max())
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_leaving_masked_outliers_out_of_the_scale_lowers_the_error() -> None:
    w_NK = np.random.default_rng(0).standard_t(3, (64, 256)).astype(np.float32)
    mask = select_mask({"a": w_NK}, MaskMethod.MAGNITUDE, 0.005)["a"]
    for scheme, group_size in ((Scheme.NF4, 64), (Scheme.INT4, 32), (Scheme.INT4, 128)):
        aware = quantize(w_NK, scheme, group_size, keep_of(mask, (64, 256)))
        unaware = quantize(w_NK, scheme, group_size)
        errors = [error_of([("a", w_NK, q, mask)])["relative_error"] for q in (aware, unaware)]
        assert errors[0] < errors[1] * 0.97


def test_a_weight_of_zeros_has_no_error() -> None:
    zeros = np.zeros((2, 64), np.float32)
    report = error_of([("a", zeros, quantize(zeros, Scheme.NF4, 64), None)])
    assert report["relative_error"] == report["tensors"][0]["relative_error"] == 0


def test_a_tensor_that_the_model_lacks_or_has_in_another_shape_is_refused() -> None:
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    quantized = quantize(np.ones((2, 64), np.float32), Scheme.NF4, 64)
    with pytest.raises(InputError, match=r"layers.9: expected a weight .2, 64. in the model, got None"):
        apply_quantized(model, [("layers.9", quantized)])
    with pytest.raises(InputError, match="expected a weight"):
        apply_quantized(model, [("model.layers.0.self_attn.q_proj.weight", quantized)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
