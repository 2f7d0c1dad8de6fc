"""Tests of scheme `SOURCE`: the codes of GGUF blocks, bit for bit, against the `gguf` package."""

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import dequantize as decoded_by_gguf
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization import dequantize, quantize
from permille.quantization.gguf_blocks import TYPES, blocks_of, codes_of, type_name
from permille.quantization.types import Scheme


def any_blocks(name: str, rows: int = 30, columns: int = 96) -> NDArray[np.uint8]:
    """Return blocks of random bytes. Their scales have both signs, and some are subnormal or zero."""
    size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    rng = np.random.default_rng(0)
    block_BR = rng.integers(0, 256, (rows * columns // size, block_bytes), np.uint8)
    heads = 2 if name == "Q4_1" else 1
    half_BH = rng.standard_normal((len(block_BR), heads)).astype("<f2")
    half_BH[0], half_BH[1], half_BH[2] = 0, -0.0, 6e-8
    block_BR[:, : 2 * heads] = half_BH.view(np.uint8)
    return block_BR.reshape(rows, -1)


@pytest.mark.parametrize("name", TYPES)
def test_blocks_come_back_bit_for_bit_and_mean_what_gguf_says(name: str) -> None:
    block_NR = any_blocks(name)
    tensor = codes_of(block_NR, 96)
    assert (tensor.scheme, tensor.shape, type_name(tensor)) == (Scheme.SOURCE, (30, 96), name)
    assert np.array_equal(blocks_of(tensor), block_NR)
    expected_NK = decoded_by_gguf(block_NR, GGMLQuantizationType[name])
    assert np.array_equal(dequantize(tensor), expected_NK)


def test_what_is_no_kept_block_is_refused() -> None:
    with pytest.raises(InputError, match="none of Q8_0, Q4_0, Q4_1"):
        codes_of(np.zeros((4, 22), np.uint8), 32)
    with pytest.raises(InputError, match="Rows of 48"):
        codes_of(np.zeros((4, 27), np.uint8), 48)
    block_NR = any_blocks("Q4_1")
    block_NR[3, 2:4] = np.array([np.inf], "<f2").view(np.uint8)
    with pytest.raises(InputError, match="not finite"):
        codes_of(block_NR, 96)
    with pytest.raises(InputError, match="Add the model from such a file"):
        quantize(np.ones((4, 32), np.float32), Scheme.SOURCE, 32)


def test_minima_that_do_not_fit_are_refused() -> None:
    tensor = codes_of(any_blocks("Q4_1"), 96)
    assert tensor.minima is not None
    for other in (
        replace(tensor, minima=tensor.minima[:-1]),
        replace(codes_of(any_blocks("Q8_0"), 96), minima=tensor.minima),
    ):
        with pytest.raises(InputError, match="minima"):
            dequantize(other)
