"""Dequantization in torch against the numpy one that defines it, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from permille.engines.dequantization import PackedWeight
from permille.errors import InputError
from permille.quantization import QuantizedTensor, Scheme, dequantize, quantize

# Odd counts, blocks across rows, short tails, one weight, and more than one chunk of the CPU path.
SHAPES = [(1, 1), (3, 5), (7, 33), (4, 64), (5, 128), (9, 130), (3, 131), (640, 850), (3, 200_001)]


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
