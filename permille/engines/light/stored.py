"""A matrix that stays where the package mapped it, in the dtype of the package: embedding and head.

Rows are widened to float32 when they are looked up or multiplied, a block at a time; the table is never
converted as a whole.
"""

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.threads import blocks
from permille.native.layers import product_bf16
from permille.native.weights import widen_bf16, widen_f16
from permille.tensors import RawTensor

Array = NDArray[np.float32]

_LOOK_UP_ROWS = 64
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class StoredMatrix:
    """[rows, width]."""

    def __init__(self, raw: RawTensor) -> None:
        self._dtype = raw.dtype
        self._stored: NDArray[np.generic] = raw.data.view(_STORED[raw.dtype]).reshape(raw.shape)
        self.rows, self.width = raw.shape

    def look_up(self, row_M: NDArray[np.int64], out_MH: Array) -> None:
        """Those rows, widened into `out`, some at a time."""
        for part in blocks(len(row_M), _LOOK_UP_ROWS):
            self._widen(np.ascontiguousarray(self._stored[row_M[part]]), out_MH[part])

    def block(self, rows: slice, scratch: Array) -> Array:
        """Rows `rows` as float32: a view where they are stored so, else widened into the flat `scratch`."""
        found = self._stored[rows]
        if self._dtype == "F32":
            view: Array = found.astype(np.float32, copy=False)
            return view
        out_RH = scratch[: found.size].reshape(found.shape)
        self._widen(found, out_RH)
        return out_RH

    def row_product(self, x_H: Array, rows: slice, out_R: Array) -> bool:
        """`out = W[rows] x` without widening to memory; False where that is not possible."""
        if self._dtype != "BF16":
            return False
        return product_bf16(x_H, self._stored[rows].view(np.uint16), out_R)

    @property
    def is_float32(self) -> bool:
        """Whether `block` needs no scratch memory."""
        return self._dtype == "F32"

    def _widen(self, stored: NDArray[np.generic], out: Array) -> None:
        if self._dtype == "BF16":
            widen_bf16(stored.view(np.uint16), out)
        elif self._dtype == "F16":
            widen_f16(stored.view(np.uint16), out)
        else:
            np.copyto(out, stored)
