"""The masked positions of one layer: values set there, and products with matrices that are zero elsewhere.

On a CPU the compiled kernels do both where they are there; else torch does, with the same results for what is
set, and sums that may differ in the last bits.

# Legend: N, K = out and in features; C masked weights of the layer; Q matrices; M flat tokens.
"""

import warnings
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permille.native.library import load
from permille.native.products import compressed_rows, sparse_product
from permille.native.weights import set_values


class SparsePattern:
    """Where a layer is masked."""

    def __init__(self, indices: NDArray[np.uint32], shape: tuple[int, int], device: torch.device) -> None:
        """`indices` are flat and strictly increasing; they are borrowed."""
        self.shape = shape
        self.indices = indices
        self._device = device
        self._native = device.type == "cpu" and load() is not None

    @cached_property
    def compressed(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Row starts [N + 1] and columns [C]."""
        return compressed_rows(self.indices, self.shape)

    def set(self, tile_RK: Tensor, first: int, value_C: Tensor, mark: int) -> None:
        """Write float32 values, rounded to the tile's dtype, to masked positions `mark` and on.

        Args:
            tile_RK: rows of the weight from `first` on, contiguous.
        """
        offset, until = first * self.shape[1], mark + len(value_C)
        if self._native and tile_RK.dtype in (torch.float32, torch.bfloat16):
            set_values(as_numpy(tile_RK), self.indices[mark:until], as_numpy(value_C), offset)
            return
        places_C = self._places[mark:until]
        tile_RK.view(-1).index_copy_(0, places_C - offset if offset else places_C, value_C.to(tile_RK.dtype))

    def product(self, x: Tensor, z_QC: Tensor) -> Tensor:
        """x [..., K] times the transposes of Q sparse matrices with values z_QC, summed in float32 or finer.

        Returns:
            [Q, ..., N] in the dtype of x.
        """
        queries, (rows, columns) = len(z_QC), self.shape
        x_MK = x.reshape(-1, columns)
        if self._native and x.dtype in (torch.float32, torch.bfloat16):
            y_QMN = torch.zeros(queries, len(x_MK), rows)
            self.add_product(x_MK.float(), z_QC.float(), y_QMN)
        else:
            y_QMN = self._torch_product(x_MK, z_QC)
        return y_QMN.to(x.dtype).reshape(queries, *x.shape[:-1], rows)

    def add_product(self, x_MK: Tensor, z_QC: Tensor, y_QMN: Tensor) -> None:
        """`y[q] += x Z_q^T`, all float32 on a CPU."""
        row_starts, columns = self.compressed
        sparse_product(as_numpy(x_MK), row_starts, columns, as_numpy(z_QC), as_numpy(y_QMN))

    def add_token_product(self, x_K: Tensor, z_C: Tensor, y_N: Tensor) -> None:
        """`y += Z x` for one token, float32 on a CPU, entries added in their order: so little work that
        calling a kernel would cost more."""
        columns_C = torch.from_numpy(self.compressed[1])
        y_N.index_add_(0, self._entry_rows, x_K.index_select(0, columns_C).mul_(z_C))

    def _torch_product(self, x_MK: Tensor, z_QC: Tensor) -> Tensor:
        """One compressed-row product for all Q, the matrices stacked: 2 to 3% of the dense product at a
        density of 0.001, where gathering columns costs half of it."""
        queries, (rows, columns) = len(z_QC), self.shape
        dtype = torch.promote_types(x_MK.dtype, torch.float32)
        ends_N, columns_C = self._torch_compressed
        offsets_Q1 = torch.arange(queries, dtype=torch.int32, device=self._device)[:, None] * z_QC.shape[1]
        ends = (ends_N + offsets_Q1).flatten()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            matrix = torch.sparse_csr_tensor(
                torch.cat([ends.new_zeros(1), ends]),
                columns_C.repeat(queries),
                z_QC.to(dtype).flatten(),
                (queries * rows, columns),
                check_invariants=False,
            )
        y_QNM = (matrix @ x_MK.T.to(dtype).contiguous()).view(queries, rows, -1)
        return y_QNM.transpose(1, 2)

    @cached_property
    def _entry_rows(self) -> Tensor:
        starts_N1, _ = self.compressed
        return torch.from_numpy(np.repeat(np.arange(self.shape[0], dtype=np.int32), np.diff(starts_N1)))

    @cached_property
    def _places(self) -> Tensor:
        return torch.from_numpy(self.indices.astype(np.int64)).to(self._device)

    @cached_property
    def _torch_compressed(self) -> tuple[Tensor, Tensor]:
        """Row ends [N] and columns [C]."""
        row_starts, columns = (torch.from_numpy(array).to(self._device) for array in self.compressed)
        return row_starts[1:], columns


def as_numpy(tensor: Tensor) -> NDArray[Any]:
    """The same memory, made contiguous where it is not; bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        bits: NDArray[Any] = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        return bits
    array: NDArray[Any] = tensor.contiguous().numpy()
    return array
