"""Tensors as bytes, in the layout of safetensors. Checkpoints are read and packages written in this form."""

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.digests import JSON, canonical_json
from permille.errors import InputError

ITEM_BYTES: Mapping[str, int] = {"I64": 8, "F32": 4, "U32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1}
FLOATS = frozenset({"F32", "F16", "BF16"})
Q8_0 = "Q8_0"
"""The dtype of a matrix in blocks of GGUF: a float16 scale and 32 int8 codes for 32 weights of a row."""
Q8_0_WEIGHTS, Q8_0_BYTES = 32, 34
# The number of values that are compared at once. It keeps the temporary arrays small.
_PART = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawTensor:
    """A tensor as bytes. numpy has no bfloat16, and most tensors are copied without conversion.

    Attributes:
        name: the name in the checkpoint.
        dtype: the dtype in the spelling of safetensors, or `Q8_0`.
        shape: the shape of the numbers.
        data: uint8, 1-D, little-endian, C order. It may be a read-only map of a file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def float32(self) -> NDArray[np.float32]:
        """Return the numbers as float32 in the tensor's shape. The conversion is exact."""
        if self.dtype == Q8_0:
            block_BR = self.data.reshape(-1, Q8_0_BYTES)
            scale_B1 = np.ascontiguousarray(block_BR[:, :2]).view("<f2").astype(np.float32)
            return (block_BR[:, 2:].view(np.int8) * scale_B1).reshape(self.shape)
        if self.dtype == "F32":
            return self.data.view("<f4").astype(np.float32, copy=False).reshape(self.shape)
        if self.dtype == "F16":
            return self.data.view("<f2").astype(np.float32).reshape(self.shape)
        if self.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            high = self.data.view("<u2").astype(np.uint32) << np.uint32(16)
            return high.view(np.float32).reshape(self.shape)
        raise InputError(f"expected a tensor of BF16, F16, F32 or Q8_0, got {self.dtype}")

    def all_finite(self) -> bool:
        """Return whether all numbers are finite.

        This reads only the exponents, or for Q8_0 only the scales, and copies nothing large.
        """
        if self.dtype == Q8_0:
            scale_B = np.ascontiguousarray(self.data.reshape(-1, Q8_0_BYTES)[:, :2]).view("<f2")
            return bool(np.isfinite(scale_B).all())
        if self.dtype not in FLOATS:
            return True
        # IEEE 754: in NaN and infinity, and nowhere else, all bits of the exponent are 1.
        exponent = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[self.dtype]
        bits = self.data.view("<u4" if self.dtype == "F32" else "<u2")
        return all(
            not np.any((bits[at : at + _PART] & exponent) == exponent) for at in range(0, bits.size, _PART)
        )


def release(array: NDArray[Any]) -> None:
    """Return the pages of a mapped file to the system (Linux). Do nothing for other arrays.

    No data is lost: the pages are read from the file again when they are needed.
    """
    base: object = array.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def safetensors_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the canonical header of a safetensors file, including its length (FORMAT 4.1).

        safetensors_header({"ids": ("U32", (4, 16)), "kinds": ("U8", (4, 2))})

    Args:
        tensors: dtype and shape by name, in the order of their data in the file.
    """
    entries: dict[str, JSON] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = canonical_json(entries)
    # FORMAT 4.1: the data begin at a multiple of 8, so that every number is aligned.
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def write_float32(
    path: Path, shapes: Mapping[str, tuple[int, ...]], arrays: Iterable[NDArray[np.float32]]
) -> None:
    """Write a safetensors file in float32, one tensor after the other. The file is durable on return.

    If `arrays` is a generator, only one tensor is in memory at a time. The safetensors library would need all
    tensors in memory.

    Args:
        path: the file.
        shapes: the shapes of the tensors by name, in order.
        arrays: the tensors, in that order.
    """
    with path.open("wb") as file:
        file.write(safetensors_header({name: ("F32", tuple(shape)) for name, shape in shapes.items()}))
        for array in arrays:
            file.write(np.ascontiguousarray(array, "<f4").data)
        file.flush()
        os.fsync(file.fileno())
