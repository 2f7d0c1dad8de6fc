"""Tests of decoding rows, setting values in tiles, and widening: every path gives the quantizer's bits."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native import weights
from permille.quantization import dequantize, quantize
from permille.quantization.packed_rows import PackedRows, decoded_at
from permille.quantization.types import QuantizedTensor, Scheme
from tests.unit.package.tiny import kept

# Odd columns, groups that end within a row, and rows that begin within a byte or a block.
CASES = [
    (Scheme.NF4, 64, (37, 191)),
    (Scheme.NF4, 64, (24, 256)),
    (Scheme.NF4, 64, (1, 5)),
    (Scheme.INT4, 32, (37, 191)),
    (Scheme.INT4, 128, (24, 384)),
    (Scheme.INT4, 128, (9, 130)),
    (Scheme.INT8, 128, (37, 191)),
    (Scheme.INT8, 128, (24, 384)),
    ("Q8_0", 32, (37, 96)),
    ("Q4_0", 32, (37, 96)),
    ("Q4_1", 32, (37, 96)),
]


def quantized(scheme: Scheme | str, group_size: int, shape: tuple[int, int]) -> QuantizedTensor:
    """Return a seeded weight with a group of zeros and a group of large values."""
    w_NK = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    # Scales of GGUF blocks are float16, so their values must be smaller.
    w_NK[shape[0] // 2] *= 1e30 if isinstance(scheme, Scheme) else 1e3
    w_NK[-1] = 0
    if not isinstance(scheme, Scheme):
        return kept(w_NK, scheme)
    return quantize(w_NK, scheme, group_size)


@pytest.mark.parametrize(("scheme", "group_size", "shape"), CASES)
def test_rows_are_the_quantizers_bits(
    path: str, scheme: Scheme | str, group_size: int, shape: tuple[int, int]
) -> None:
    tensor = quantized(scheme, group_size, shape)
    expected_NK = dequantize(tensor)
    weight = PackedRows.of(tensor)
    rows = shape[0]
    for first, last in [(0, rows), (rows // 3, rows // 2), (rows - 1, rows), (rows, rows)]:
        out = np.empty((last - first, shape[1]), np.float32)
        weights.dequantize_rows(weight, first, last, out)
        assert np.array_equal(out.view(np.uint32), expected_NK[first:last].view(np.uint32))


@pytest.mark.parametrize(("scheme", "group_size", "shape"), CASES)
def test_decoded_at_picks_single_weights(
    scheme: Scheme | str, group_size: int, shape: tuple[int, int]
) -> None:
    tensor = quantized(scheme, group_size, shape)
    flat = np.arange(0, shape[0] * shape[1], 3, dtype=np.uint32)
    found = decoded_at(PackedRows.of(tensor), flat)
    assert np.array_equal(found, dequantize(tensor).reshape(-1)[flat])
    with pytest.raises(InputError, match="expected flat indices below"):
        decoded_at(PackedRows.of(tensor), np.array([shape[0] * shape[1]]))


def test_values_are_set_in_a_tile(path: str) -> None:
    values = np.array([1.00390625, -3.4e38, np.nan], np.float32)
    tile = np.zeros((2, 4), np.float32)
    weights.set_values(tile, np.array([100, 103, 107], np.uint32), values, 100)
    assert np.array_equal(tile.reshape(-1)[[0, 3, 7]], values, equal_nan=True)
    assert np.count_nonzero(tile) == 3


@pytest.mark.parametrize("bad", [99, 108, 2**32 - 1])
def test_an_index_outside_the_tile_writes_nothing(path: str, bad: int) -> None:
    tile = np.zeros(8, np.float32)
    with pytest.raises(InputError, match=f"expected indices within 100..108, got {bad}"):
        weights.set_values(tile, np.array([100, bad], np.uint32), np.ones(2, np.float32), 100)
    assert not tile.any()


def test_widening_is_exact_for_every_bit_pattern(path: str) -> None:
    source = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(1 << 16, np.float32)
    weights.widen_bf16(source, out)
    assert np.array_equal(out.view(np.uint32), source.astype(np.uint32) << 16)
    for view in (source, source.view(np.float16)):
        out[:] = 0
        weights.widen_f16(view, out)
        expected = torch.from_numpy(source.view(np.float16)).float().numpy()
        assert np.array_equal(out, expected, equal_nan=True)
        assert np.array_equal(np.signbit(out), np.signbit(expected))


WEIGHT = PackedRows.of(quantized(Scheme.INT4, 32, (6, 64)))
F32, U16, U32 = np.float32, np.uint16, np.uint32


def _read_only(array: NDArray[np.float32]) -> NDArray[np.float32]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "call",
    [
        lambda: weights.dequantize_rows(WEIGHT, 0, 7, np.empty((7, 64), F32)),
        lambda: weights.dequantize_rows(WEIGHT, 3, 2, np.empty((0, 64), F32)),
        lambda: weights.dequantize_rows(WEIGHT, -1, 2, np.empty((3, 64), F32)),
        lambda: weights.dequantize_rows(WEIGHT, 0, 2, np.empty((2, 63), F32)),
        lambda: weights.dequantize_rows(WEIGHT, 0, 2, np.empty((64, 2), F32).T),
        lambda: weights.dequantize_rows(WEIGHT, 0, 2, np.empty((2, 64), np.float64)),
        lambda: weights.dequantize_rows(WEIGHT, 0, 2, _read_only(np.empty((2, 64), F32))),
        lambda: weights.set_values(np.empty(4, np.float64), np.zeros(1, U32), np.zeros(1, F32)),
        lambda: weights.set_values(np.empty(4, F32)[::2], np.zeros(1, U32), np.zeros(1, F32)),
        lambda: weights.set_values(np.empty(4, F32), np.zeros(1, np.int32), np.zeros(1, F32)),
        lambda: weights.set_values(np.empty(4, F32), np.zeros(2, U32), np.zeros(1, F32)),
        lambda: weights.set_values(np.empty(4, F32), np.zeros(3, U32)[::2], np.zeros(2, F32)),
        lambda: weights.set_values(_read_only(np.empty(4, F32)), np.zeros(1, U32), np.zeros(1, F32)),
        lambda: weights.widen_bf16(np.zeros(3, U16), np.zeros(4, F32)),
        lambda: weights.widen_f16(np.zeros(3, F32), np.zeros(3, F32)),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_never_reaches_a_pointer(path: str, call: object) -> None:
    assert callable(call)
    with pytest.raises(InputError, match="expected"):
        call()


def test_a_packed_weight_is_checked_when_it_is_made() -> None:
    tensor = quantized(Scheme.NF4, 64, (24, 256))
    short = QuantizedTensor(
        scheme=tensor.scheme, shape=(25, 256), group_size=64, packed=tensor.packed, scales=tensor.scales
    )
    with pytest.raises(InputError, match="expected 3200 packed bytes"):
        PackedRows.of(short)
