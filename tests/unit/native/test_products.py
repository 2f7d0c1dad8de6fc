"""Tests of the sparse product and of a token's product against float64, with equal bits if promised."""

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native import library
from permille.native.products import TokenProduct, sparse_product
from permille.quantization import dequantize, quantize
from permille.quantization.packed_rows import PackedRows
from permille.quantization.types import QuantizedTensor, Scheme
from tests.unit.package.tiny import kept

F32, I32 = np.float32, np.int32
SHAPE = (53, 96)


def compressed_rows(
    flat: NDArray[np.uint32] | NDArray[np.int64], shape: tuple[int, int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return row starts and columns of flat indices."""
    starts = np.searchsorted(flat, np.arange(shape[0] + 1) * shape[1])
    return starts.astype(I32), (flat % shape[1]).astype(I32)


def _sparse(
    tokens: int, queries: int = 3
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Return x, the entries and their indices. Some rows have no entry, and one has many."""
    rng = np.random.default_rng(tokens)
    flat = np.sort(rng.choice(SHAPE[0] * SHAPE[1], 90, replace=False))
    flat = np.unique(np.concatenate([flat[flat // SHAPE[1] % 5 > 0], np.arange(7 * 96, 7 * 96 + 40)]))
    x_MK = rng.normal(size=(tokens, SHAPE[1])).astype(F32)
    return x_MK, rng.normal(size=(queries, len(flat))).astype(F32), flat


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 16, 21])
def test_sparse_product_adds_every_variant(path: str, tokens: int) -> None:
    x_MK, z_QC, flat = _sparse(tokens)
    out_QMN = np.full((3, tokens, SHAPE[0]), 2, F32)
    sparse_product(x_MK, *compressed_rows(flat.astype(np.uint32), SHAPE), z_QC, out_QMN)
    for out_MN, z_C in zip(out_QMN, z_QC, strict=True):
        dense_NK = np.zeros(SHAPE)
        dense_NK.reshape(-1)[flat.astype(np.int64)] = z_C
        assert np.abs(out_MN - (2 + x_MK @ dense_NK.T)).max(initial=0) < 1e-5


def test_sparse_product_has_the_same_bits_on_every_path_and_for_every_batch(
    compiled: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_MK, z_QC, flat = _sparse(21)
    rows = compressed_rows(flat.astype(np.uint32), SHAPE)
    whole_QMN = np.zeros((3, 21, SHAPE[0]), F32)
    sparse_product(x_MK, *rows, z_QC, whole_QMN)
    for first in range(21):
        one_QMN = np.zeros((3, 1, SHAPE[0]), F32)
        sparse_product(x_MK[first : first + 1], *rows, z_QC, one_QMN)
        assert np.array_equal(one_QMN[:, 0], whole_QMN[:, first])
    monkeypatch.setenv(library.VARIABLE, "scalar")
    scalar_QMN = np.zeros_like(whole_QMN)
    sparse_product(x_MK, *rows, z_QC, scalar_QMN)
    assert np.array_equal(scalar_QMN, whole_QMN)


# Shapes of whole groups, of rows that end within a group, and of columns that only decoding supports.
PACKED = [
    (Scheme.NF4, 64, (300, 256)),
    (Scheme.NF4, 64, (30, 96)),
    (Scheme.NF4, 64, (20, 191)),
    (Scheme.INT4, 32, (300, 96)),
    (Scheme.INT4, 128, (40, 160)),
    (Scheme.INT4, 32, (20, 191)),
    (Scheme.INT8, 128, (40, 160)),
    (Scheme.INT8, 128, (20, 191)),
    ("Q8_0", 32, (40, 160)),
    ("Q4_0", 32, (40, 160)),
    ("Q4_1", 32, (40, 160)),
    ("Q4_1", 32, (20, 864)),
]


def coded(w_NK: NDArray[np.float32], scheme: Scheme | str, group_size: int) -> QuantizedTensor:
    """Return a weight in a scheme, or in a GGUF type that scheme `SOURCE` keeps."""
    if isinstance(scheme, Scheme):
        return quantize(w_NK, scheme, group_size)
    return kept(w_NK, scheme)


@pytest.mark.parametrize(("scheme", "group_size", "shape"), PACKED)
def test_product_of_a_token_has_codes_values_and_bias_wherever_it_is_cut(
    path: str, scheme: Scheme | str, group_size: int, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(5)
    tensor = coded(rng.normal(size=shape).astype(F32), scheme, group_size)
    flat = np.flatnonzero(rng.random(shape).reshape(-1) < 0.02)
    value_C = rng.normal(size=len(flat)).astype(F32)
    w_NK = dequantize(tensor).astype(np.float64)
    w_NK.reshape(-1)[flat] += value_C
    x_1K = rng.normal(size=(1, shape[1])).astype(F32)
    bound_1N = 1e-6 * (np.abs(x_1K) @ np.abs(w_NK).T + 1)
    # Other products come from the system's BLAS library, which does not promise equal bits.
    exact = (
        path not in ("numpy", "scalar") and (scheme is not Scheme.NF4 or shape[1] == 256) and shape[1] != 191
    )
    for bias_N in (None, rng.normal(size=shape[0]).astype(F32)):
        product = TokenProduct(PackedRows.of(tensor), compressed_rows(flat, shape), value_C, bias_N)
        whole_1N, parts_1N = np.empty((1, shape[0]), F32), np.empty((1, shape[0]), F32)
        product.run(x_1K, whole_1N, 0, shape[0])
        assert (np.abs(whole_1N - x_1K @ w_NK.T - (0 if bias_N is None else bias_N)) < bound_1N).all()
        product.run(x_1K, parts_1N, 0, 9)
        product.run(x_1K, parts_1N, 9, shape[0])
        assert np.array_equal(parts_1N, whole_1N) if exact else np.allclose(parts_1N, whole_1N, 0, 1e-4)


X, STARTS, COLUMNS = np.zeros((2, 4), F32), np.array([0, 1, 2], I32), np.array([0, 3], I32)
Z, OUT = np.zeros((1, 2), F32), np.zeros((1, 2, 2), F32)
NOTHING, EMPTY = (np.zeros(7, I32), np.empty(0, I32)), np.empty(0, F32)
WEIGHT = PackedRows.of(quantize(np.ones((6, 64), F32), Scheme.INT4, 32))


@pytest.mark.parametrize(
    "call",
    [
        lambda: sparse_product(X.astype(np.float64), STARTS, COLUMNS, Z, OUT),
        lambda: sparse_product(X.T.copy().T, STARTS, COLUMNS, Z, OUT),
        lambda: sparse_product(X, STARTS.astype(np.int64), COLUMNS, Z, OUT),
        lambda: sparse_product(X, STARTS[1:].copy(), COLUMNS, Z, OUT[..., :1].copy()),
        lambda: sparse_product(X, np.array([0, 1, 3], I32), COLUMNS, Z, OUT),
        lambda: sparse_product(X, np.empty(0, I32), COLUMNS, Z, OUT),
        lambda: sparse_product(X, STARTS, COLUMNS, Z[:, :1].copy(), OUT),
        lambda: sparse_product(X, STARTS, COLUMNS, Z, OUT[:, :1].copy()),
        lambda: TokenProduct(WEIGHT, (STARTS, COLUMNS), Z[0], None),
        lambda: TokenProduct(WEIGHT, (np.zeros(7, I32), COLUMNS), Z[0, :1].copy(), None),
        lambda: TokenProduct(WEIGHT, (np.arange(1, 8, dtype=I32), COLUMNS), Z[0], None),
        lambda: TokenProduct(WEIGHT, NOTHING, EMPTY, np.zeros(5, F32)),
        lambda: TokenProduct(WEIGHT, NOTHING, EMPTY, None).run(
            np.zeros((1, 63), F32), np.zeros((1, 6), F32), 0, 6
        ),
        lambda: TokenProduct(WEIGHT, NOTHING, EMPTY, None).run(
            np.zeros((1, 64), F32), np.zeros((1, 5), F32), 0, 5
        ),
        lambda: TokenProduct(WEIGHT, NOTHING, EMPTY, None).run(
            np.zeros((1, 64), F32), np.zeros((1, 6), F32), 0, 7
        ),
    ],
)
def test_what_does_not_fit_never_reaches_a_pointer(path: str, call: object) -> None:
    assert callable(call)
    with pytest.raises(InputError, match="expected"):
        call()
