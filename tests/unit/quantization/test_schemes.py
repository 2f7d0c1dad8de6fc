"""Tests of NF4 against bitsandbytes bit for bit, of integers against their formula, and of common rules."""

import dataclasses
from typing import Any, cast

import bitsandbytes.functional
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization import (
    default_group_size,
    dequantize,
    nf4,
    quantize,
    source,
)
from permille.quantization.types import QuantizedTensor, Scheme

SCALED = [(Scheme.NF4, 64), (Scheme.INT4, 32), (Scheme.INT4, 128), (Scheme.INT8, 128)]


def weight(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * np.float32(0.02)


def codes_of(quantized: QuantizedTensor) -> NDArray[np.uint8]:
    packed = quantized.packed
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    return codes[: quantized.shape[0] * quantized.shape[1]]


def by_bitsandbytes(w_NK: NDArray[np.float32]) -> Any:
    """Return the codes of bitsandbytes, and its quantization state."""
    return bitsandbytes.functional.quantize_4bit(
        torch.from_numpy(w_NK), blocksize=64, quant_type="nf4", compress_statistics=False
    )


@pytest.mark.parametrize("shape", [(64, 128), (48, 64), (7, 33), (1, 1), (3, 65), (129, 31), (1, 64)])
def test_nf4_equals_bitsandbytes_bit_for_bit(shape: tuple[int, int]) -> None:
    w_NK = weight(*shape)
    ours = quantize(w_NK, Scheme.NF4, 64)
    packed, state = by_bitsandbytes(w_NK)
    padded = packed.numpy().reshape(-1).copy()
    if w_NK.size % 2:  # the format sets the unused nibble to 0, bitsandbytes to the code of a zero
        padded[-1] &= 0xF0
    assert ours.packed.tobytes() == padded.tobytes()
    assert ours.scales.tobytes() == state.absmax.numpy().tobytes()
    if shape[1] % 2 == 0:  # for odd rows, bitsandbytes first compiles a kernel for half a minute
        theirs = bitsandbytes.functional.dequantize_4bit(packed, state).numpy()
        assert dequantize(ours).tobytes() == theirs.tobytes()
    codebook = nf4.NF4_CODES[codes_of(ours)] * np.repeat(state.absmax.numpy(), 64)[: w_NK.size]
    assert dequantize(ours).tobytes() == codebook.tobytes()


def test_nf4_equals_bitsandbytes_on_zeros_denormals_and_ties() -> None:
    table = bitsandbytes.functional.get_4bit_type("nf4", device="cpu").numpy()
    assert nf4.NF4_CODES.tobytes() == table.tobytes()
    # Each tie is in the middle between two codes, relative to the largest weight, 1.
    between = (nf4.NF4_CODES[:-1] + nf4.NF4_CODES[1:]) / np.float32(2)
    ties = np.zeros(64, np.float32)
    ties[:15], ties[15] = between, 1
    w_NK = np.stack([np.zeros(64, np.float32), np.full(64, 1e-41, np.float32), ties, -ties * 3])
    ours = quantize(w_NK, Scheme.NF4, 64)
    packed, state = by_bitsandbytes(w_NK)
    assert ours.packed.tobytes() == packed.numpy().tobytes()
    assert ours.scales.tobytes() == state.absmax.numpy().tobytes()


@pytest.mark.parametrize(("columns", "group_size"), [(64, 32), (70, 32), (31, 32), (200, 128), (7, 128)])
def test_int4_follows_its_formula_in_every_group(columns: int, group_size: int) -> None:
    w_NK = weight(5, columns)
    quantized = quantize(w_NK, Scheme.INT4, group_size)
    assert quantized.scales.shape == (5, -(-columns // group_size))
    decoded_NK, codes_NK = dequantize(quantized), codes_of(quantized).reshape(5, columns)
    for row in range(5):
        for group in range(quantized.scales.shape[1]):
            part = slice(group * group_size, (group + 1) * group_size)
            scale = np.float32(np.abs(w_NK[row, part]).max() / np.float32(7))
            assert quantized.scales[row, group] == scale
            expected = np.clip(np.rint(w_NK[row, part] / scale), -8, 7)
            assert (codes_NK[row, part] == expected + 8).all()
            assert (decoded_NK[row, part] == (expected * scale).astype(np.float32)).all()


@pytest.mark.parametrize("columns", [64, 200, 7, 128])
def test_int8_equals_torch_in_every_group(columns: int) -> None:
    w_NK = weight(5, columns)
    w_NK[3] = 0
    quantized = quantize(w_NK, Scheme.INT8, 128)
    codes_NK = quantized.packed.view(np.int8).reshape(w_NK.shape)
    padded = torch.nn.functional.pad(torch.from_numpy(w_NK), (0, -columns % 128)).reshape(5, -1, 128)
    scale_NG1 = padded.abs().amax(dim=2, keepdim=True) / 127
    expected = (padded / scale_NG1).nan_to_num().round().clamp(-127, 127)
    assert (codes_NK == expected.reshape(5, -1)[:, :columns].to(torch.int8).numpy()).all()
    assert (quantized.scales == scale_NG1[:, :, 0].numpy()).all()
    assert (dequantize(quantized) == (expected * scale_NG1).reshape(5, -1)[:, :columns].numpy()).all()


@pytest.mark.parametrize(("scheme", "group_size"), SCALED)
@pytest.mark.parametrize("columns", [128, 129])
def test_a_zero_group_has_scale_zero_and_decodes_to_zeros(
    scheme: Scheme, group_size: int, columns: int
) -> None:
    w_NK = np.zeros((3, columns), np.float32)
    w_NK[0, 5] = 1
    quantized = quantize(w_NK, scheme, group_size)
    assert quantized.scales.reshape(-1)[-1] == 0
    assert (dequantize(quantized) == w_NK).all()


@pytest.mark.parametrize(("scheme", "group_size"), SCALED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused_with_the_name_and_place(
    scheme: Scheme, group_size: int, value: float
) -> None:
    w_NK = weight(4, 64)
    w_NK[2, 3] = value
    with pytest.raises(InputError, match=r"blocks\.0\.q has the weight .* at flat index 131"):
        quantize(w_NK, scheme, group_size, name="blocks.0.q")


@pytest.mark.parametrize(("scheme", "group_size"), SCALED)
@pytest.mark.parametrize("shape", [(9, 77), (5, 320), (301, 3)])
def test_chunks_do_not_change_a_bit(
    scheme: Scheme, group_size: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source.CHUNK_WEIGHTS % nf4.BLOCK_SIZE == 0
    w_NK = weight(*shape)
    whole = quantize(w_NK, scheme, group_size)
    decoded = dequantize(whole)
    for module in ("nf4", "source"):
        monkeypatch.setattr(f"permille.quantization.{module}.CHUNK_WEIGHTS", 128)
    chunked = quantize(w_NK, scheme, group_size)
    assert chunked.packed.tobytes() == whole.packed.tobytes()
    assert chunked.scales.tobytes() == whole.scales.tobytes()
    assert dequantize(chunked).tobytes() == decoded.tobytes()


def test_odd_number_of_codes_leaves_the_last_low_nibble_zero_for_int4() -> None:
    quantized = quantize(weight(1, 33), Scheme.INT4, 32)
    assert quantized.packed.size == 17
    assert quantized.packed[-1] & 15 == 0


def test_wrong_inputs_are_refused() -> None:
    w_NK = weight(2, 64)
    with pytest.raises(InputError, match="nf4 takes only groups of 64, not 32"):
        quantize(w_NK, Scheme.NF4, 32)
    with pytest.raises(InputError, match="32 or 128 for int4, got 64"):
        quantize(w_NK, Scheme.INT4, 64)
    with pytest.raises(InputError, match="a group size of 128 for int8, got 32"):
        quantize(w_NK, Scheme.INT8, 32)
    with pytest.raises(InputError, match="expected a float32 matrix, got float64"):
        quantize(w_NK.astype(np.float64), Scheme.NF4, 64)


@pytest.mark.parametrize(("scheme", "group_size"), SCALED)
def test_dequantize_refuses_sizes_that_the_shape_does_not_ask_for(scheme: Scheme, group_size: int) -> None:
    good = quantize(weight(2, 128), scheme, group_size)
    with pytest.raises(InputError, match=f"expected {good.packed.size} packed bytes"):
        dequantize(dataclasses.replace(good, packed=good.packed[1:]))
    with pytest.raises(InputError, match="expected float32 scales"):
        dequantize(dataclasses.replace(good, scales=good.scales[1:]))


@pytest.mark.parametrize(("scheme", "group_size"), SCALED)
def test_a_scheme_may_be_named_by_its_text(scheme: Scheme, group_size: int) -> None:
    named, meant = (quantize(weight(2, 128), name, group_size) for name in (scheme.value, scheme))
    assert named.scheme is scheme
    assert named.packed.tobytes() == meant.packed.tobytes()
    assert named.scales.tobytes() == meant.scales.tobytes()
    assert default_group_size(scheme.value) == default_group_size(scheme)


def test_a_scheme_that_does_not_exist_is_refused() -> None:
    refused = "'nf5' is not a scheme. Choose one of nf4, int4, int8, source"
    with pytest.raises(InputError, match=refused):
        quantize(weight(2, 128), "nf5", 64)
    with pytest.raises(InputError, match=refused):
        default_group_size("nf5")
    with pytest.raises(InputError, match=refused):
        dataclasses.replace(quantize(weight(2, 128), "nf4", 64), scheme=cast("Scheme", "nf5"))
