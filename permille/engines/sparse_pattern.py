"""Products with matrices that are zero but at the masked weights of one layer.

# Legend: N, K = out and in features; C masked weights of the layer; Q matrices; M flat tokens.
"""

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class SparsePattern:
    """Positions of the masked weights of one layer, and products with matrices that are zero elsewhere."""

    def __init__(self, indices: NDArray[np.uint32], shape: tuple[int, int], device: torch.device) -> None:
        rows, columns = shape
        self.shape = shape
        flat = indices.astype(np.int64)
        self.indices = torch.from_numpy(flat).to(device)
        ends = np.cumsum(np.bincount(flat // columns, minlength=rows))
        self._columns_C = torch.from_numpy((flat % columns).astype(np.int32)).to(device)
        self._ends_N = torch.from_numpy(ends.astype(np.int32)).to(device)

    def product(self, x: Tensor, z_QC: Tensor) -> Tensor:
        """x [..., K] times the transposes of Q sparse matrices with values z_QC, summed in float32 or finer.

        One compressed-row product for all Q, the matrices stacked: 2 to 3% of the dense product at a
        density of 0.001, where gathering columns costs half of it.

        Returns:
            [Q, ..., N] in the dtype of x.
        """
        queries, count = z_QC.shape
        rows, columns = self.shape
        dtype = torch.promote_types(x.dtype, torch.float32)
        x_KM = x.reshape(-1, columns).T.to(dtype).contiguous()
        offsets_Q1 = torch.arange(queries, dtype=torch.int32, device=x.device)[:, None] * count
        ends = (self._ends_N + offsets_Q1).flatten()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            matrix = torch.sparse_csr_tensor(
                torch.cat([ends.new_zeros(1), ends]),
                self._columns_C.repeat(queries),
                z_QC.to(dtype).flatten(),
                (queries * rows, columns),
                check_invariants=False,
            )
        y_QNM = (matrix @ x_KM).view(queries, rows, -1)
        return y_QNM.transpose(1, 2).to(x.dtype).reshape(queries, *x.shape[:-1], rows)
