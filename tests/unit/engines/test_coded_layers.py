"""Tests of coded layers: decoding to the package's bits, and gradients of sparse products."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from numpy.typing import NDArray

from permille.engines import coded_layers
from permille.engines.coded_layers import CodedTable, CodedWeight, SparseAdd, tiled_product
from permille.quantization import default_group_size, dequantize, quantize
from permille.quantization.gguf_blocks import TYPES, codes_of
from permille.quantization.tables import code_table
from permille.quantization.types import QuantizedTensor, Scheme
from permille.tensors import RawTensor
from tests.unit.quantization.test_gguf_blocks import any_blocks

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
FLOAT32 = torch.float32


def _weight(rows: int, columns: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


def _coded() -> Iterator[QuantizedTensor]:
    """Yield tensors of every scheme and GGUF type. Some have rows that end within a byte and a group."""
    for scheme in (Scheme.NF4, Scheme.INT4, Scheme.INT8):
        for shape in ((7, 45), (9, 128)):
            yield quantize(_weight(*shape), scheme, default_group_size(scheme))
    for name in TYPES:
        yield codes_of(any_blocks(name), 96)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("coded", list(_coded()), ids=lambda coded: f"{coded.scheme}{coded.shape}")
def test_tiles_have_the_bits_of_the_package(device: str, coded: QuantizedTensor) -> None:
    weight, expected_NK = CodedWeight(coded, torch.device(device), FLOAT32), dequantize(coded)
    for rows in (slice(0, coded.shape[0]), slice(1, 2), slice(3, 7)):
        np.testing.assert_array_equal(weight.tile(rows).cpu().numpy(), expected_NK[rows])
    index_C = np.flatnonzero(np.arange(expected_NK.size) % 5 == 3)
    np.testing.assert_array_equal(weight.at(index_C).cpu().numpy(), expected_NK.reshape(-1)[index_C])
    x_MK = torch.from_numpy(_weight(3, coded.shape[1])).to(device)
    expected = x_MK.cpu().numpy() @ expected_NK.T
    np.testing.assert_allclose(weight.product(x_MK).cpu().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_bitsandbytes_decodes_what_tiles_do(device: str) -> None:
    weight = CodedWeight(quantize(_weight(9, 128), Scheme.NF4, 64), torch.device(device), FLOAT32)
    assert weight._state is not None
    theirs = dequantize_4bit(weight.packed.view(-1, 1), weight._state)
    assert torch.equal(theirs, weight.tile(slice(0, 9)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", [Scheme.NF4, Scheme.INT4])
def test_products_have_the_gradients_of_dense_ones(device: str, scheme: Scheme) -> None:
    """Compare the gradients of the inputs and of the sparse values with those of a dense matrix."""
    coded = quantize(_weight(9, 128), scheme, default_group_size(scheme))
    weight = CodedWeight(coded, torch.device(device), FLOAT32)
    index_C = np.sort(np.random.default_rng(1).choice(9 * 128, 40, replace=False)).astype(np.uint32)
    x_VMK = torch.from_numpy(_weight(2 * 5, 128)).to(device).view(2, 5, 128).requires_grad_()
    values_VC = torch.from_numpy(_weight(2, 40)).to(device).requires_grad_()
    y_VMN = weight.product(x_VMK.view(10, 128)).view(2, 5, 9) + SparseAdd(weight, index_C)(x_VMK, values_VC)
    found = torch.autograd.grad(y_VMN.square().sum(), (x_VMK, values_VC))

    dense_NK = torch.from_numpy(dequantize(coded)).to(device)
    place = torch.from_numpy(index_C.astype(np.int64)).to(device)
    w_VNK = torch.stack([dense_NK.view(-1).index_put((place,), value).view(9, 128) for value in values_VC])
    z_VMN = x_VMK @ w_VNK.transpose(1, 2)
    expected = torch.autograd.grad(z_VMN.square().sum(), (x_VMK, values_VC))
    torch.testing.assert_close(y_VMN, z_VMN, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_the_way_back_sums_tiles_in_float32(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum in bfloat16 would be rounded at each of the 256 tiles, with about eight times this error."""
    monkeypatch.setattr(coded_layers, "_TILE_WEIGHTS", 64)
    coded = quantize(_weight(256, 64), Scheme.INT4, 32)
    weight = CodedWeight(coded, torch.device(device), torch.bfloat16)
    x_MK = torch.zeros(4, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    d_MN = torch.from_numpy(_weight(4, 256)).to(device, torch.bfloat16)
    (found_MK,) = torch.autograd.grad(tiled_product(x_MK, weight), x_MK, d_MN)
    expected_MK = d_MN.float() @ weight.tile(slice(0, 256)).float()
    assert found_MK.dtype == torch.bfloat16
    assert (found_MK - expected_MK).norm() < 0.004 * expected_MK.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["Q8_0", "F32"])
def test_a_table_gives_rows_and_products(device: str, dtype: str) -> None:
    w_DH = _weight(10, 64)
    data = w_DH.view(np.uint8).reshape(-1)
    raw = RawTensor(name="embedding", dtype="F32", shape=(10, 64), data=data)
    raw = code_table(raw) if dtype == "Q8_0" else raw
    table, expected_DH = CodedTable(raw, torch.device(device)), raw.float32()
    ids = torch.tensor([[3, 9], [0, 3]], device=device)
    np.testing.assert_array_equal(table.tile(ids).cpu().numpy(), expected_DH[[[3, 9], [0, 3]]])
    found = tiled_product(torch.from_numpy(_weight(2, 64)).to(device), table).cpu().numpy()
    np.testing.assert_allclose(found, _weight(2, 64) @ expected_DH.T, rtol=1e-4, atol=1e-4)
