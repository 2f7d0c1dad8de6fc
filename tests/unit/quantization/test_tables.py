"""Tests of embedding and head in Q8_0: llama.cpp's rounding, exact decoding, and packages."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from permille.choices import Embeddings
from permille.errors import InputError
from permille.native.layers import product_q8_0
from permille.native.library import paths
from permille.native.weights import widen_q8_0
from permille.package.blobs import BlobFolder
from permille.package.reader import Package, verify_package
from permille.quantization.tables import code_table
from permille.tensors import Q8_0, RawTensor
from tests.unit.package.tiny import LLAMA, as_dtype, write_tiny

EMBEDDING = "model.embed_tokens.weight"


def table(numbers: NDArray[np.float32], dtype: str = "F32") -> RawTensor:
    return as_dtype(EMBEDDING, numbers, dtype)


def numbers(rows: int = 200, columns: int = 96) -> NDArray[np.float32]:
    """Return small, large, subnormal and zero blocks, and halves, which distinguish the rounding rules."""
    rng = np.random.default_rng(0)
    w_NK = rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(0.1)
    w_NK[1], w_NK[2, :32], w_NK[3] = 0, np.float32(1e-7), w_NK[3] * 1e4
    w_NK[4] = np.arange(columns, dtype=np.float32) % 32 - np.float32(15.5)
    w_NK[4, ::32] = 127
    return w_NK


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_rounding_is_that_of_llama_cpp(dtype: str) -> None:
    source = table(numbers(), dtype)
    expected = quantize(source.float32(), GGMLQuantizationType.Q8_0)
    found = code_table(source)
    assert (found.dtype, found.shape) == (Q8_0, source.shape)
    assert np.array_equal(found.data, expected.reshape(-1))
    assert np.array_equal(found.float32(), dequantize(expected, GGMLQuantizationType.Q8_0))


def test_a_table_on_the_grid_gets_its_own_codes_back() -> None:
    """If the largest code of a block is 127, as in llama.cpp's blocks, the same scale is found again."""
    once = code_table(table(numbers(5000, 64)[5:]))
    again = code_table(RawTensor(name="w", dtype="F32", shape=once.shape, data=_bytes(once.float32())))
    assert np.array_equal(again.data, once.data)


def _bytes(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)


def test_what_blocks_cannot_hold_stays_or_is_refused() -> None:
    odd = table(np.ones((4, 40), np.float32))
    assert code_table(odd) is odd
    coded = code_table(table(numbers()))
    assert code_table(coded) is coded
    for wrong, words in ((np.inf, "not finite"), (np.nan, "not finite"), (1e30, "--embeddings source")):
        with pytest.raises(InputError, match=words):
            code_table(table(np.full((2, 32), wrong, np.float32)))


@pytest.mark.parametrize("path", [*paths(), "off"])
def test_kernels_decode_exactly(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERMILLE_NATIVE", path)
    coded = code_table(table(numbers()))
    stored_NR, out_NK = coded.data.reshape(200, -1), np.empty((200, 96), np.float32)
    widen_q8_0(stored_NR, out_NK)
    assert np.array_equal(out_NK, coded.float32())
    x_K, out_N = np.random.default_rng(1).standard_normal(96).astype(np.float32), np.empty(200, np.float32)
    assert product_q8_0(x_K, stored_NR, out_N) == (path != "off")
    if path != "off":
        np.testing.assert_allclose(out_N, out_NK @ x_K, rtol=1e-4, atol=1e-5)
    assert not product_q8_0(x_K[:95], stored_NR, out_N)


def test_kernels_refuse_shapes_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="source"):
        widen_q8_0(np.zeros((2, 33), np.uint8), np.empty((2, 32), np.float32))
    with pytest.raises(InputError, match="out"):
        widen_q8_0(np.zeros((2, 34), np.uint8), np.empty((2, 40), np.float32))


@pytest.mark.parametrize("tied", [False, True])
def test_a_package_keeps_embedding_and_head_in_blocks(tied: bool, tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    config = LLAMA | {"tie_word_embeddings": tied}
    tiny = write_tiny(blobs, config=config, dtype="BF16", embeddings=Embeddings.Q8_0)
    plainer = write_tiny(blobs, config=config, dtype="BF16")
    package = verify_package(blobs, tiny.digest)
    tables = {EMBEDDING} if tied else {EMBEDDING, "lm_head.weight"}
    for name in package.plain_names:
        source = tiny.weights[name]
        expected = code_table(source) if name in tables else source
        found = package.plain(name)
        assert (found.dtype, found.shape, package.plain_shape(name)) == (
            expected.dtype,
            source.shape,
            source.shape,
        )
        assert package.plain_dtype(name) == expected.dtype
        assert np.array_equal(found.data, expected.data)
    saved = Package.open(blobs, plainer.digest).size_bytes - package.size_bytes
    assert abs(saved - len(tables) * 64 * (2 * 32 - 34)) < 64


def test_a_source_in_blocks_is_written_as_it_is(tmp_path: Path) -> None:
    coded = code_table(table(numbers(64, 32)))
    other = replace(coded, data=coded.data.copy())
    other.data[2:34] = 5  # no code is 127, so rounding again would give other codes
    assert code_table(other) is other
