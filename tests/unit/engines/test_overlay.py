"""One overlay layer: values replace, nothing of one variant stays for the next, small values survive bf16."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from permille.engines.dequantization import PackedWeight
from permille.engines.overlay import FixedValues, Overlay, OverlayLinear
from permille.engines.sparse_pattern import SparsePattern
from permille.quantization import QuantizedTensor, Scheme, dequantize, quantize

ROWS, COLUMNS = 24, 40


@pytest.fixture(params=["native", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels where this machine has them, and torch."""
    if request.param == "torch":
        monkeypatch.setenv("PERMILLE_NATIVE", "off")


def quantized_random() -> QuantizedTensor:
    weight = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    return quantize(weight, Scheme.INT4, 32)


def random_mask(count: int = 60) -> NDArray[np.uint32]:
    found = np.random.default_rng(1).choice(ROWS * COLUMNS, count, replace=False)
    return np.sort(found).astype(np.uint32)


def layer_of(
    quantized: QuantizedTensor,
    mask: NDArray[np.uint32],
    *,
    dtype: torch.dtype = torch.float32,
    cached: bool = False,
    start: int = 0,
) -> tuple[Overlay, OverlayLinear]:
    device = torch.device("cpu")
    overlay = Overlay(device, dtype)
    return overlay, OverlayLinear(overlay, PackedWeight(quantized, device), mask, start, cached=cached)


def replaced(quantized: QuantizedTensor, mask: NDArray[np.uint32], values: Tensor) -> Tensor:
    weight = dequantize(quantized)
    weight.reshape(-1)[mask] = values.numpy()
    return torch.from_numpy(weight)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_values_replace_the_codes_in_each_variant(cached: bool, biased: bool) -> None:
    quantized, mask = quantized_random(), random_mask()
    overlay, layer = layer_of(quantized, mask, cached=cached, start=5)
    bias = torch.randn(ROWS) if biased else None
    layer.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    values = torch.randn(3, 5 + len(mask) + 2)
    x = torch.randn(6, 7, COLUMNS)
    for _ in range(2):  # The second time the cache is used, and holds another variant's values.
        with overlay.using(values):
            got = layer(x)
        for variant in range(3):
            part = slice(2 * variant, 2 * variant + 2)
            weight = replaced(quantized, mask, values[variant, 5 : 5 + len(mask)])
            expected = torch.nn.functional.linear(x[part], weight, bias)
            torch.testing.assert_close(got[part], expected, rtol=1e-5, atol=1e-5)


def test_a_layer_is_dequantized_once_for_all_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, PackedWeight, "dequantize_rows")
    overlay, layer = layer_of(quantized_random(), random_mask())
    with overlay.using(torch.randn(8, 60)):
        layer(torch.randn(8, COLUMNS))
    assert len(calls) == 1


def test_a_cached_layer_is_dequantized_once_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, PackedWeight, "dequantize_rows")
    overlay, layer = layer_of(quantized_random(), random_mask(), cached=True)
    for _ in range(3):
        with overlay.using(torch.randn(2, 60)):
            layer(torch.randn(2, COLUMNS))
    assert len(calls) == 1


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_set_the_values_of_their_own_rows(
    monkeypatch: pytest.MonkeyPatch, cached: bool, dtype: torch.dtype
) -> None:
    """int4 rows are cut two by two here."""
    quantized, mask = quantized_random(), random_mask()
    overlay, whole = layer_of(quantized, mask, dtype=dtype)
    monkeypatch.setattr("permille.engines.overlay._TILE_WEIGHTS", 100)
    _, layer = layer_of(quantized, mask, dtype=dtype, cached=cached)
    layer._overlay = overlay
    x = torch.randn(6, COLUMNS).to(dtype)
    with overlay.using(torch.randn(3, len(mask))):
        torch.testing.assert_close(layer(x), whole(x))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_fixed_values_are_those_of_any_other_call(cached: bool, biased: bool) -> None:
    quantized, mask = quantized_random(), random_mask()
    overlay, layer = layer_of(quantized, mask, cached=cached)
    layer.bias = torch.nn.Parameter(torch.randn(ROWS), requires_grad=False) if biased else None
    fixed, others = FixedValues(torch.randn(len(mask))), torch.randn(2, len(mask))
    for tokens in (20, 1, 3):  # A prompt, then tokens.
        x = torch.randn(1, tokens, COLUMNS)
        with overlay.using(fixed.value_K[None]):
            expected = layer(x)
        with overlay.using(others):  # What another call leaves behind.
            layer(torch.randn(2, 2, COLUMNS))
        for _ in range(2):
            with overlay.using(fixed.value_K[None], fixed=fixed):
                torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_fixed_values_are_set_once_in_a_kept_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, SparsePattern, "set")
    overlay, layer = layer_of(quantized_random(), random_mask(), cached=True)
    texts = [FixedValues(torch.randn(60)) for _ in range(2)]
    for fixed, expected in ((texts[0], 1), (texts[0], 1), (texts[1], 2), (texts[0], 3)):
        with overlay.using(fixed.value_K[None], fixed=fixed):
            layer(torch.randn(1, COLUMNS))
        assert len(calls) == expected


def test_a_layer_without_masked_weights_is_its_codes() -> None:
    quantized = quantized_random()
    overlay, layer = layer_of(quantized, random_mask(0), dtype=torch.bfloat16)
    x = torch.randn(4, COLUMNS).bfloat16()
    with overlay.using(torch.randn(2, 3)):
        got = layer(x)
    torch.testing.assert_close(got, x @ torch.from_numpy(dequantize(quantized)).bfloat16().T)


def test_a_call_outside_a_forward_pass_fails() -> None:
    _, layer = layer_of(quantized_random(), random_mask())
    with pytest.raises(RuntimeError, match="outside"):
        layer(torch.randn(1, COLUMNS))


def test_perturbations_below_a_bfloat16_step_reach_the_output() -> None:
    """A change of 2^-10 on weights of 1 is a quarter of bf16's step there: rounded alone, it is lost."""
    quantized = quantize(np.zeros((1, COLUMNS), np.float32), Scheme.INT4, 32)
    mask = np.arange(COLUMNS, dtype=np.uint32)
    overlay, layer = layer_of(quantized, mask, dtype=torch.bfloat16)
    signs = torch.tensor([1.0, -1.0]).repeat(COLUMNS // 2)
    with overlay.using(torch.stack([signs + 2**-10 * sign for sign in (1, -1)])):
        plus, minus = layer(torch.ones(2, COLUMNS, dtype=torch.bfloat16))
    assert plus.item() == COLUMNS * 2**-10
    assert minus.item() == -COLUMNS * 2**-10


@pytest.mark.parametrize("count", [0, 1, 60])
def test_sparse_products_are_dense_products_with_zeros(count: int) -> None:
    mask = random_mask(count)
    pattern = SparsePattern(mask, (ROWS, COLUMNS), torch.device("cpu"))
    z_QC, x = torch.randn(3, count), torch.randn(2, 5, COLUMNS)
    got = pattern.product(x, z_QC)
    for z_C, y in zip(z_QC, got, strict=True):
        dense = torch.zeros(ROWS * COLUMNS)
        dense[torch.from_numpy(mask.astype(np.int64))] = z_C
        torch.testing.assert_close(y, x @ dense.view(ROWS, COLUMNS).T, rtol=1e-5, atol=1e-5)


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """Record each call of a method, and let it happen."""
    calls: list[str] = []
    original: Callable[..., Any] = getattr(owner, name)

    def counting(*args: object, **options: object) -> object:
        calls.append(name)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, counting)
    return calls
