"""NF4 codes by bitsandbytes, where a worker computes on a GPU. It never ran on one: tests run its CPU code.

Ours are its tensors (ADR 13), so there is nothing to convert.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from permille.quantization import nf4
from permille.quantization.source import check_finite, check_weight
from permille.quantization.types import QuantizedTensor, Scheme


def quantize_nf4(w_NK: NDArray[np.float32], device: str, *, name: str = "weight") -> QuantizedTensor:
    """The same as `nf4.quantize`, computed on a device.

    A weight that is no whole number of blocks is coded here: bitsandbytes treats the last one otherwise.

    Raises:
        InputError: NaN or infinity, or no float32 matrix.
    """
    if w_NK.size % nf4.BLOCK_SIZE:
        return nf4.quantize(w_NK, name=name)
    from bitsandbytes.functional import quantize_4bit

    check_weight(w_NK, name)
    check_finite(w_NK.reshape(-1), 0, name)
    packed, state = quantize_4bit(
        torch.from_numpy(w_NK).to(device),
        blocksize=nf4.BLOCK_SIZE,
        compress_statistics=False,
        quant_type="nf4",
    )
    rows, columns = w_NK.shape
    return QuantizedTensor(
        scheme=Scheme.NF4,
        shape=(rows, columns),
        group_size=nf4.BLOCK_SIZE,
        packed=packed.cpu().numpy().reshape(-1),
        scales=state.absmax.cpu().numpy(),
    )
