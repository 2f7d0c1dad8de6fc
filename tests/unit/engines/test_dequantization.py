"""Dequantization in torch against the numpy one that defines it, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from permille.engines.dequantization import PackedWeight
from permille.engines.row_threads import RowThreads
from permille.errors import InputError
from permille.quantization import QuantizedTensor, Scheme, dequantize, quantize

# Odd counts, blocks across rows, short tails, one weight, and more than one chunk of the CPU path.
SHAPES = [(1, 1), (3, 5), (7, 33), (4, 64), (5, 128), (9, 130), (3, 131), (640, 850), (3, 200_001)]


@pytest.fixture(params=["native", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels where this machine has them, and torch."""
    if request.param == "torch":
        monkeypatch.setenv("PERMILLE_NATIVE", "off")


def quantized_random(shape: tuple[int, int], scheme: Scheme, group_size: int) -> QuantizedTensor:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    weight[0] *= 1e-30
    weight[-1] *= 1e6
    weight.reshape(-1)[: weight.size // 3] = 0
    return quantize(weight, scheme, group_size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("scheme", "group_size"), [(Scheme.NF4, 64), (Scheme.INT4, 32), (Scheme.INT4, 128)])
def test_float32_has_the_bits_of_the_definition(
    shape: tuple[int, int], scheme: Scheme, group_size: int
) -> None:
    quantized = quantized_random(shape, scheme, group_size)
    weight = PackedWeight(quantized, torch.device("cpu"))
    buffer = torch.full((weight.buffer_size + 7,), torch.nan)
    got = weight.dequantize_into(buffer)
    assert got.shape == shape
    np.testing.assert_array_equal(got.numpy().view(np.uint32), dequantize(quantized).view(np.uint32))
    assert buffer[weight.buffer_size :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", list(Scheme))
def test_other_dtypes_are_the_float32_value_rounded_once(scheme: Scheme, dtype: torch.dtype) -> None:
    quantized = quantized_random((640, 850), scheme, 64 if scheme is Scheme.NF4 else 32)
    weight = PackedWeight(quantized, torch.device("cpu"))
    got = weight.dequantize_into(torch.empty(weight.buffer_size, dtype=dtype))
    assert torch.equal(got, torch.from_numpy(dequantize(quantized)).to(dtype))


@pytest.mark.parametrize("weights", [1, 3000, 1 << 30])
@pytest.mark.parametrize("shape", [(7, 33), (9, 130), (640, 85), (3, 131)], ids=str)
@pytest.mark.parametrize("scheme", list(Scheme))
def test_tiles_are_rows_of_the_whole(scheme: Scheme, shape: tuple[int, int], weights: int) -> None:
    quantized = quantized_random(shape, scheme, 64 if scheme is Scheme.NF4 else 32)
    weight = PackedWeight(quantized, torch.device("cpu"))
    tiles = weight.tiles(weights)
    assert [0, *(last for _, last in tiles)] == [*(first for first, _ in tiles), shape[0]]
    for first, last in tiles:
        got = weight.dequantize_rows(first, last, torch.empty((last - first) * shape[1] + 1))
        np.testing.assert_array_equal(got.numpy(), dequantize(quantized)[first:last])


def test_threads_share_the_rows() -> None:
    quantized = quantized_random((640, 850), Scheme.NF4, 64)
    weight = PackedWeight(quantized, torch.device("cpu"), RowThreads(3))
    got = weight.dequantize_into(torch.empty(weight.buffer_size))
    np.testing.assert_array_equal(got.numpy(), dequantize(quantized))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("scheme", list(Scheme))
def test_few_tokens_multiply_straight_from_the_codes(scheme: Scheme, tokens: int) -> None:
    quantized = quantized_random((640, 850), scheme, 64 if scheme is Scheme.NF4 else 32)
    quantized.scales[:] = np.clip(quantized.scales, 0, 1)
    weight = PackedWeight(quantized, torch.device("cpu"), RowThreads(2))
    x = torch.randn(tokens, 850)
    dense = torch.from_numpy(dequantize(quantized))
    torch.testing.assert_close(weight.product(x), x @ dense.T, rtol=1e-4, atol=1e-4)
    places = np.array([0, 5, 640 * 850 - 1], np.uint32)
    assert torch.equal(weight.decoded_at(places), dense.flatten()[places.astype(np.int64)])


def test_codes_are_not_copied() -> None:
    quantized = quantized_random((64, 64), Scheme.NF4, 64)
    quantized.packed.setflags(write=False)
    weight = PackedWeight(quantized, torch.device("cpu"))
    assert weight._packed.data_ptr() == quantized.packed.ctypes.data


@pytest.mark.parametrize("part", ["packed", "scales"])
def test_codes_and_scales_of_another_size_are_refused(part: str) -> None:
    quantized = quantized_random((4, 64), Scheme.INT4, 32)
    shorter = replace(quantized, **{part: getattr(quantized, part)[:-1].copy()})
    with pytest.raises(InputError, match="expected"):
        PackedWeight(shorter, torch.device("cpu"))
