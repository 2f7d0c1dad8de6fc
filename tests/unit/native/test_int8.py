"""Tests of eight-bit activations with int4 codes: exact integers, and the same bits on every path."""

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.int8 import RUN, int8_product, int8_rows, padded, quantize_tokens, scratch_floats
from permille.native.library import VARIABLE, Library, load
from permille.quantization.packed_rows import PackedRows, decode_rows
from permille.quantization.types import QuantizedTensor, Scheme

SHAPES = [(8, 32, 32), (37, 172, 32), (24, 75, 64), (50, 256, 64)]


def _weight(rows: int, columns: int, group_size: int, seed: int = 0) -> PackedRows:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows * columns + 1) // 2, dtype=np.uint8)
    scales = (0.01 * rng.random((rows, -(-columns // group_size)))).astype(np.float32)
    return _rows(packed, scales, group_size, (rows, columns))


def _rows(
    packed: NDArray[np.uint8], scales: NDArray[np.float32], group_size: int, shape: tuple[int, int]
) -> PackedRows:
    tensor = QuantizedTensor(
        scheme=Scheme.INT4, shape=shape, group_size=group_size, packed=packed, scales=scales
    )
    return PackedRows.of(tensor)


def _product(
    weight: PackedRows, x_MK: NDArray[np.float32], first: int = 0, last: int | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Return the quantized tokens, their scales and the product."""
    rows, columns = weight.shape
    last = rows if last is None else last
    q_MP = np.empty((len(x_MK), padded(columns)), np.uint8)
    scale_M = np.empty(len(x_MK), np.float32)
    quantize_tokens(x_MK, q_MP, scale_M)
    found = int8_rows(weight, first, last, np.empty(scratch_floats(last - first, columns), np.float32))
    out_MR = np.full((len(x_MK), last - first), 7, np.float32)
    int8_product(found, q_MP, scale_M, out_MR)
    return q_MP, scale_M, out_MR


@pytest.mark.parametrize(("rows", "columns", "group_size"), SHAPES)
@pytest.mark.usefixtures("path")
def test_a_product_is_that_of_the_rounded_tokens(rows: int, columns: int, group_size: int) -> None:
    weight = _weight(rows, columns, group_size)
    x_MK = np.random.default_rng(1).standard_normal((11, columns)).astype(np.float32)

    q_MP, scale_M, got = _product(weight, x_MK, 3, rows)

    rounded_MK = (q_MP[:, :columns].astype(np.float64) - 128) * scale_M[:, None]
    assert np.abs(rounded_MK - x_MK).max() <= 0.5001 * scale_M.max()
    np.testing.assert_allclose(scale_M, np.abs(x_MK).max(axis=1) / 127, rtol=1e-6)
    expected = rounded_MK @ decode_rows(weight, 3, rows).T.astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max() + 1e-6)


@pytest.mark.parametrize(("rows", "columns", "group_size"), SHAPES)
def test_every_path_has_the_bits_of_numpy(
    rows: int, columns: int, group_size: int, compiled: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = _weight(rows, columns, group_size)
    x_MK = np.random.default_rng(2).standard_normal((9, columns)).astype(np.float32)
    x_MK[1], x_MK[2, 3], x_MK[3, 1], x_MK[4] = 0, np.nan, np.inf, 1e-38
    found = _product(weight, x_MK)
    assert load() is compiled
    monkeypatch.setenv(VARIABLE, "off")

    for got, wanted in zip(found, _product(weight, x_MK), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.usefixtures("path")
def test_the_largest_numbers_do_not_overflow() -> None:
    """Activations of 1 or 255 with codes of -8 or 7 give the largest 16-bit sums."""
    for byte, code in ((0x00, -8), (0xFF, 7)):
        weight = _rows(np.full(8 * 64 // 2, byte, np.uint8), np.ones((8, 2), np.float32), 32, (8, 64))
        for sign in (1, -1):
            x_MK = np.full((5, 64), sign * 127, np.float32)
            np.testing.assert_array_equal(_product(weight, x_MK)[2], sign * 127.0 * code * 64)


@pytest.mark.usefixtures("path")
def test_tokens_that_are_zero_or_not_finite_spoil_no_other() -> None:
    weight = _weight(16, 64, 32)
    x_MK = np.random.default_rng(3).standard_normal((6, 64)).astype(np.float32)
    alone = _product(weight, x_MK)[2]
    x_MK[1], x_MK[2, 3], x_MK[4, 0] = 0, np.nan, -np.inf

    got = _product(weight, x_MK)[2]

    np.testing.assert_array_equal(got[[0, 3, 5]], alone[[0, 3, 5]])
    assert not got[1].any()
    assert np.isnan(got[[2, 4]]).all()


@pytest.mark.usefixtures("path")
def test_a_token_has_the_same_bits_wherever_it_stands() -> None:
    weight = _weight(24, 96, 32)
    x_MK = np.random.default_rng(4).standard_normal((7, 96)).astype(np.float32)
    together = _product(weight, x_MK)[2]

    for count in (1, 2, 3, 5):
        np.testing.assert_array_equal(_product(weight, x_MK[-count:])[2], together[-count:])
    np.testing.assert_array_equal(_product(weight, x_MK, 5, 14)[2], together[:, 5:14])


def test_bad_arguments_are_refused() -> None:
    weight = _weight(8, 64, 32)
    room = np.empty(scratch_floats(8, 64), np.float32)
    found = int8_rows(weight, 0, 8, room)
    q_MP, scale_M, out = np.zeros((2, 64), np.uint8), np.zeros(2, np.float32), np.zeros((2, 8), np.float32)

    with pytest.raises(InputError, match=r"expected scratch of \d+ float32, got 3"):
        int8_rows(weight, 0, 8, room[:3])
    with pytest.raises(InputError, match="expected int4 in groups of a multiple of 32, got int4 in 16"):
        int8_rows(_weight(8, 64, 16), 0, 8, room)
    with pytest.raises(InputError, match=r"expected a range within 0\.\.8, got 4\.\.9"):
        int8_rows(weight, 4, 9, room)
    with pytest.raises(InputError, match="out"):
        int8_product(found, q_MP, scale_M, out[:, :7].copy())
    with pytest.raises(InputError, match="out"):
        int8_product(found, q_MP, scale_M, np.zeros((2, 16), np.float32)[:, ::2])
    with pytest.raises(InputError, match="q"):
        int8_product(found, q_MP[:, : 64 - RUN], scale_M, out)
    with pytest.raises(InputError, match="scale"):
        int8_product(found, q_MP, scale_M[:1], out)
    with pytest.raises(InputError, match="q"):
        quantize_tokens(np.zeros((2, 60), np.float32), q_MP[:, :60].copy(), scale_M)
