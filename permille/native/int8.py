"""Products of 8-bit inputs and 4-bit codes.

An instruction for 8-bit integers computes several times as many products as an instruction for float32.

The features of a token are rounded to 8 bits with one scale for the token, `max|x| / 127`. The codes of
an int4 weight are used as integers. Sums within a run of 32 features are exact. The sum of a run is
scaled and added in float32, in the order of the runs. So all paths of the library, and numpy, give the
same bits.

Shapes: M = tokens, N, K = out and in features; P = K rounded up to whole runs; R = rows of a range.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_output, check_range
from permille.native.library import load
from permille.quantization.packed_rows import PackedRows
from permille.quantization.types import Scheme

RUN = 32
# The number of rows that are stored side by side. Four features of all these rows take 32 bytes together
# (`src/int8.inc`).
_PANEL = 8
# A token with a smaller max|x| becomes zero. Below 4e-37, 127 / max|x| would overflow.
_SMALLEST = np.float32(1e-30)


def padded(columns: int) -> int:
    """Return the number of features of a token in 8 bits, which is a multiple of 32.

    >>> padded(75)
    96
    """
    return -(-columns // RUN) * RUN


def has_int8(scheme: Scheme, group_size: int) -> bool:
    """Return whether the scheme is int4, with a single scale within each run of 32 codes."""
    return scheme is Scheme.INT4 and group_size % RUN == 0


def quantize_tokens(x_MK: NDArray[np.float32], q_MP: NDArray[np.uint8], scale_M: NDArray[np.float32]) -> None:
    """Round each token to `x = scale * (q - 128)`, with q from 1 to 255. Beyond K features, q is 128 (zero).

    A token with max|x| below 1e-30 becomes zero. A token with NaN or infinity gets the scale NaN.

    Raises:
        InputError: an array has another type or shape.
    """
    check_array("x", x_MK, np.float32, (None, None))
    tokens, columns = x_MK.shape
    check_output("q", q_MP, np.uint8, (tokens, padded(columns)))
    check_output("scale", scale_M, np.float32, (tokens,))
    library = load()
    if library is not None:
        library.call("quantize_tokens", x_MK, tokens, columns, q_MP.shape[1], q_MP, scale_M)
        return
    with np.errstate(all="ignore"):
        largest_M = np.abs(x_MK).max(axis=1, initial=0)
        something_M = np.isfinite(largest_M) & (largest_M >= _SMALLEST)
        scale_M[:] = np.where(something_M, largest_M / np.float32(127), np.float32(0))
        scale_M[~np.isfinite(largest_M)] = np.nan
        # 128 stands for 0, so features beyond K and tokens of zeros add nothing.
        q_MP[:] = 128
        rounded = np.rint(x_MK[something_M] * (np.float32(127) / largest_M[something_M])[:, None])
        q_MP[something_M, :columns] = (rounded + 128).astype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int8Rows:
    """Some rows of a weight in the layout that `int8_product` takes.

    Attributes:
        panels: int8, the codes of eight rows side by side.
        scales: float32, one for each row and run.
        offset: float32 [R rounded up to 8], 128 times the sum of a row's weights. `int8_product` subtracts
            it, because q is 128 larger than the number that it stands for.
        rows: R.
        columns: K.
    """

    panels: NDArray[np.int8]
    scales: NDArray[np.float32]
    offset: NDArray[np.float32]
    rows: int
    columns: int


def scratch_floats(rows: int, columns: int) -> int:
    """Return how many float32 numbers of scratch memory `int8_rows` needs."""
    whole, wide = -(-rows // _PANEL) * _PANEL, padded(columns)
    return whole * (wide // 4 + wide // RUN + 1)


def int8_rows(weight: PackedRows, first: int, last: int, scratch: NDArray[np.float32]) -> Int8Rows:
    """Convert rows of an int4 weight for `int8_product`. The result is valid until `scratch` is reused.

    Raises:
        InputError: the range is outside of the weight, the scheme is not int4, or the memory is too small.
    """
    check_range(first, last, weight.shape[0])
    if not has_int8(weight.scheme, weight.group_size):
        raise InputError(
            f"expected int4 in groups of a multiple of {RUN}, got {weight.scheme} in {weight.group_size}"
        )
    rows, columns = last - first, weight.shape[1]
    check_output("scratch", scratch, np.float32, (None,))
    if len(scratch) < scratch_floats(rows, columns):
        raise InputError(f"expected scratch of {scratch_floats(rows, columns)} float32, got {len(scratch)}")
    whole, wide = -(-rows // _PANEL) * _PANEL, padded(columns)
    codes, scales = whole * wide // 4, whole * wide // RUN
    found = Int8Rows(
        panels=scratch[:codes].view(np.int8),
        scales=scratch[codes : codes + scales],
        offset=scratch[codes + scales : codes + scales + whole],
        rows=rows,
        columns=columns,
    )
    library = load()
    if library is None:
        _numpy_rows(weight, first, last, found)
    else:
        library.call(
            "int8_panels", weight.packed, weight.scales, weight.group_size, columns, wide, first, last,
            found.panels, found.scales, found.offset,
        )  # fmt: skip
    return found


def int8_product(
    weight: Int8Rows,
    q_MP: NDArray[np.uint8],
    scale_M: NDArray[np.float32],
    out_MR: NDArray[np.float32],
) -> None:
    """Set `out = x W^T` for tokens x that `quantize_tokens` has rounded.

    Raises:
        InputError: an array has another type or shape.
    """
    wide = padded(weight.columns)
    check_array("q", q_MP, np.uint8, (None, wide))
    check_array("scale", scale_M, np.float32, (len(q_MP),))
    check_output("out", out_MR, np.float32, (len(q_MP), weight.rows))
    library = load()
    if library is None:
        _numpy_product(weight, q_MP, scale_M, out_MR)
        return
    library.call(
        "int8_product", weight.panels, weight.scales, weight.offset, weight.rows, wide, q_MP, scale_M,
        len(q_MP), out_MR,
    )  # fmt: skip


def _numpy_rows(weight: PackedRows, first: int, last: int, out: Int8Rows) -> None:
    rows, columns = last - first, weight.shape[1]
    whole, wide = len(out.offset), padded(columns)
    flat_RK = np.arange(first * columns, last * columns, dtype=np.int64).reshape(rows, columns)
    # FORMAT 4.2: the first of two codes is in the high half of its byte.
    shift = np.where(flat_RK & 1, 0, 4).astype(np.uint8)
    # Rows and features beyond the weight have code 0.
    code_NP = np.zeros((whole, wide), np.int8)
    code_NP[:rows, :columns] = ((weight.packed[flat_RK >> 1] >> shift) & 15).astype(np.int8) - 8
    panels = code_NP.reshape(whole // _PANEL, _PANEL, wide // 4, 4).transpose(0, 2, 1, 3)
    out.panels[:] = panels.reshape(-1)
    groups = -(-columns // weight.group_size)
    scale_NR = np.zeros((whole, wide // RUN), np.float32)
    every = np.arange(wide // RUN) * RUN // weight.group_size
    scale_NR[:rows] = weight.scales.reshape(-1, groups)[first:last][:, every]
    out.scales[:] = scale_NR.reshape(whole // _PANEL, _PANEL, -1).transpose(0, 2, 1).reshape(-1)
    sum_NR = code_NP.reshape(whole, -1, RUN).sum(axis=2, dtype=np.int32)
    out.offset[:] = 0
    # x = scale (q - 128), so a product with q is too large by 128 times the sum of the row's weights. Sum run
    # by run, in the order of the kernel, so that the bits agree.
    for run in range(wide // RUN):
        out.offset[:] += (128 * sum_NR[:, run]).astype(np.float32) * scale_NR[:, run]


def _numpy_product(
    weight: Int8Rows, q_MP: NDArray[np.uint8], scale_M: NDArray[np.float32], out_MR: NDArray[np.float32]
) -> None:
    wide, whole = q_MP.shape[1], len(weight.offset)
    panels = weight.panels.reshape(whole // _PANEL, wide // 4, _PANEL, 4)
    code_NP = panels.transpose(0, 2, 1, 3).reshape(whole, wide)[: weight.rows].astype(np.float32)
    scales = weight.scales.reshape(whole // _PANEL, wide // RUN, _PANEL)
    scale_NR = scales.transpose(0, 2, 1).reshape(whole, -1)[: weight.rows]
    a_MP = q_MP.astype(np.float32)
    sum_MN = np.zeros((len(q_MP), weight.rows), np.float32)
    with np.errstate(all="ignore"):
        for run in range(wide // RUN):
            part = slice(run * RUN, (run + 1) * RUN)
            # The sums of a run are exact, because they are integers below 2**24.
            sum_MN += (a_MP[:, part] @ code_NP[:, part].T) * scale_NR[:, run]
        out_MR[:] = scale_M[:, None] * (sum_MN - weight.offset[: weight.rows])
