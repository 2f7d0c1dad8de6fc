"""Writers of the layers (FORMAT 4). They work tensor by tensor, so a model need not fit into memory.

The same tensors in the same order give the same bytes. `reader` reads the layers. This module defines the
suffixes of tensor names that both modules use.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.package.blobs import BlobFolder
from permille.package.config_files import check_file
from permille.package.limits import FILE_NAMES, Role
from permille.package.manifest import AdapterInfo, Layer, Quantization, TensorInfo
from permille.package.safetensors_io import SafetensorsWriter
from permille.quantization.nf4 import NF4_CODES
from permille.quantization.types import (
    QuantizedTensor,
    Scheme,
    packed_size,
    scales_shape,
)
from permille.tensors import FLOATS, Q8_0, Q8_0_BYTES, Q8_0_WEIGHTS, RawTensor

ABSMAX, QUANT_MAP, QUANT_STATE = ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"
SCALES, MINIMA = ".scales", ".minima"

# The dtype and shape of each tensor, by its name or by a suffix of its name.
Layout = dict[str, tuple[str, tuple[int, ...]]]


def write_dense(
    blobs: BlobFolder, tensors: Iterable[tuple[str, QuantizedTensor]], how: Quantization
) -> Layer:
    """Write the quantized weights (FORMAT 4.2). NF4 uses the serialization of bitsandbytes.

    Raises:
        InputError: a tensor's scheme or group size is not that of `how`, or a name occurs twice.
        OSError: from the file system. No blob is left.
    """
    with SafetensorsWriter(blobs) as writer:
        for name, codes in tensors:
            if (codes.scheme, codes.group_size) != (how.name, how.group_size):
                got = f"{codes.scheme} in {codes.group_size}"
                raise InputError(f"expected {how.name} in {how.group_size}, got {name!r}: {got}")
            _add_quantized(writer, name, codes)
        return _layer(Role.DENSE, writer.finish())


def write_plain(blobs: BlobFolder, tensors: Iterable[RawTensor]) -> Layer:
    """Write all other tensors, in the model's own dtype or as a Q8_0 table (FORMAT 4.3)."""
    with SafetensorsWriter(blobs) as writer:
        for tensor in tensors:
            # safetensors has no dtype for Q8_0, so a table is stored as bytes (FORMAT 4.3).
            if tensor.dtype == Q8_0:
                _add_table(writer, tensor)
                continue
            _check_float(tensor)
            writer.add(tensor.name, tensor.dtype, tensor.shape, tensor.data)
        return _layer(Role.PLAIN, writer.finish())


def write_mask(blobs: BlobFolder, mask: Mapping[str, NDArray[np.uint32]], order: Sequence[str]) -> Layer:
    """Write the flat indices of the masked weights (FORMAT 4.4).

    Args:
        mask: strictly increasing indices by tensor name. A missing name has no masked weights.
        order: the names of all quantized tensors, in tensor_id order.

    Raises:
        InputError: a name is not in `order`, or indices do not increase.
    """
    # Without this check, the mask under a misspelt name would be dropped silently.
    unknown = sorted(mask.keys() - set(order))
    if unknown:
        raise InputError(f"The mask names tensors that are not quantized: {unknown[:3]}. Leave them out.")
    with SafetensorsWriter(blobs) as writer:
        for name in order:
            indices = np.asarray(mask.get(name, np.empty(0, np.uint32)))
            if indices.dtype != np.uint32 or indices.ndim != 1 or not np.all(indices[1:] > indices[:-1]):
                raise InputError(f"expected strictly increasing uint32 indices of {name!r}")
            writer.add(name, "U32", indices.shape, indices)
        return _layer(Role.MASK, writer.finish())


def write_adapter(
    blobs: BlobFolder, adapter: AdapterInfo, tensors: Sequence[TensorInfo], *, seed: int
) -> Layer:
    """Write the matrix A of each linear in scope, [rank, K] in F16 (FORMAT 4.10).

    Args:
        tensors: all quantized tensors, in tensor_id order. Those with a count are in scope.
    """
    with SafetensorsWriter(blobs) as writer:
        for tensor_id, tensor in enumerate(tensors):
            if tensor.count:
                # The key has the tensor_id, so each matrix has random numbers of its own.
                a_RK = random_matrix(adapter.rank, tensor.shape[1], key=(seed, tensor_id))
                writer.add(tensor.name, "F16", a_RK.shape, a_RK.astype("<f2"))
        return _layer(Role.ADAPTER, writer.finish())


def random_matrix(rank: int, columns: int, *, key: tuple[int, int]) -> NDArray[np.float32]:
    """Return a uniform random matrix A [rank, columns].

    Its numbers have the variance `1 / columns`, so the numbers of `A x` are about as large as those of x.
    """
    # numpy promises that raw words stay the same in every version. It does not promise this for normal
    # variates.
    words = np.random.Philox(key=np.array(key, np.uint64)).random_raw(rank * columns)
    # The upper 24 bits of a word become a float32 in [-1, 1) without rounding.
    uniform = (words >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    # A uniform variable on [-1, 1) has variance 1/3.
    return uniform.reshape(rank, columns) * np.float32(math.sqrt(3 / columns))


def write_values(blobs: BlobFolder, values: Iterable[RawTensor], order: Sequence[str]) -> Layer:
    """Write the values of the masked weights in the model's own dtype (FORMAT 4.5).

    Each quantized tensor gets one 1-D tensor of values.

    Args:
        values: one tensor for each name of `order`, in that order. The tensor is empty if no weights of the
            quantized tensor are masked.

    Raises:
        InputError: the tensors have other names or another order, or one is not 1-D.
    """
    names = iter(order)
    with SafetensorsWriter(blobs) as writer:
        for tensor in values:
            _check_float(tensor)
            # A reader joins the values of all tensors in this order, and replay depends on the order.
            expected = next(names, None)
            if tensor.name != expected or len(tensor.shape) != 1:
                raise InputError(f"expected 1-D values of {expected!r}, got {tensor.name!r} {tensor.shape}")
            writer.add(tensor.name, tensor.dtype, tensor.shape, tensor.data)
        missing = next(names, None)
        if missing is not None:
            raise InputError(f"The values of {missing!r} are missing.")
        return _layer(Role.VALUES, writer.finish())


def write_file(blobs: BlobFolder, path: str, data: bytes) -> Layer:
    """Write a file of the tokenizer or the config, under a name of the allow-list (FORMAT 3.3).

    Raises:
        InputError: the name is not on the list.
        PackageError: `config-malformed`, `config-key` or `config-model`: a reader would refuse the
            file.
    """
    if path not in FILE_NAMES:
        raise InputError(f"A package may not hold a file {path!r}, only {', '.join(sorted(FILE_NAMES))}.")
    check_file(path, data)
    return _layer(Role.FILE, (blobs.put_bytes(data), len(data)), path)


def masked_values(weight: RawTensor, indices: NDArray[np.uint32]) -> RawTensor:
    """Return the values of the masked weights of one tensor, in the tensor's own dtype.

    Raises:
        InputError: the tensor is not a float tensor, has numbers that are not finite, or has too few weights
            for an index.
    """
    _check_float(weight)
    # Copy bits, not numbers: numpy has no bfloat16.
    items = weight.data.view("<u4" if weight.dtype == "F32" else "<u2")
    if indices.size and int(indices.max()) >= items.size:
        raise InputError(
            f"The mask has the index {int(indices.max())} of {weight.name!r}, which has {items.size} "
            "weights. Use a mask of this model."
        )
    data = np.ascontiguousarray(items[indices]).view(np.uint8)
    return RawTensor(name=weight.name, dtype=weight.dtype, shape=indices.shape, data=data)


def dense_layout(
    scheme: Scheme, shape: tuple[int, int], group_size: int, *, bits: int, has_minima: bool
) -> Layout:
    """Return dtype and shape of the tensors of one weight, by the suffix of its name (FORMAT 4.2).

    Args:
        bits: the bits of a code. With scheme SOURCE, they may differ between tensors.
        has_minima: whether the groups have minima, which only four-bit tensors of
            scheme SOURCE can have.

    Example:
        >>> dense_layout(Scheme.INT4, (2, 32), 32, bits=4, has_minima=False)
        {'': ('U8', (32,)), '.scales': ('F32', (2, 1))}
    """
    scales = scales_shape(scheme, shape, group_size)
    size = packed_size(bits, shape)
    codes = ("I8", shape) if bits == 8 else ("U8", (size,))
    match scheme:
        case Scheme.INT4 | Scheme.INT8:
            return {"": codes, SCALES: ("F32", scales)}
        case Scheme.NF4:
            state = (len(quant_state(shape, group_size)),)
            book = ("F32", NF4_CODES.shape)
            return {
                "": ("U8", (size, 1)),
                ABSMAX: ("F32", scales),
                QUANT_MAP: book,
                QUANT_STATE: ("U8", state),
            }
        case Scheme.SOURCE:
            minima: Layout = {MINIMA: ("F16", scales)} if has_minima else {}
            return {"": codes, SCALES: ("F16", scales), **minima}
        case other:
            assert_never(other)


def quant_state(shape: tuple[int, int], group_size: int) -> bytes:
    """Return the quantization state that bitsandbytes stores with an NF4 weight.

    Example:
        >>> quant_state((2, 32), 64)
        b'{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 32]}'
    """
    # With dtype float32, dequantizing loses nothing (ADR 13).
    state = {"quant_type": "nf4", "blocksize": group_size, "dtype": "float32", "shape": list(shape)}
    return json.dumps(state).encode("ascii")


def table_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of rows of a Q8_0 table, and the bytes per row (FORMAT 4.3).

    Example:
        >>> table_shape((100, 64))
        (100, 68)
    """
    return shape[0], shape[1] // Q8_0_WEIGHTS * Q8_0_BYTES


def are_table_scales(table: RawTensor) -> bool:
    """Return whether all scales of a Q8_0 table are finite and not negative (FORMAT 4.3)."""
    scale_B = np.ascontiguousarray(table.data.reshape(-1, Q8_0_BYTES)[:, :2]).view("<f2")
    return bool(np.all((scale_B >= 0) & (scale_B < np.inf)))  # NaN fails the comparison too


def _add_table(writer: SafetensorsWriter, table: RawTensor) -> None:
    if not are_table_scales(table):
        raise InputError(f"A scale of {table.name!r} is negative, NaN or infinite.")
    writer.add(table.name, "U8", table_shape(table.shape), table.data)


def _add_quantized(writer: SafetensorsWriter, name: str, quantized: QuantizedTensor) -> None:
    scheme, shape, group_size = quantized.scheme, quantized.shape, quantized.group_size
    scales = np.asarray(quantized.scales, "<f4")
    arrays: dict[str, NDArray[Any]] = {
        "": quantized.packed,
        QUANT_MAP: NF4_CODES,
        QUANT_STATE: np.frombuffer(quant_state(shape, group_size), np.uint8),
        MINIMA: scales if quantized.minima is None else quantized.minima,
    }
    has_minima = quantized.minima is not None
    layout = dense_layout(scheme, shape, group_size, bits=quantized.bits, has_minima=has_minima)
    for suffix, (dtype, stored) in layout.items():
        # Any other suffix is that of the scales: `.absmax` for NF4, and `.scales` for all other schemes.
        array = arrays.get(suffix, scales)
        writer.add(name + suffix, dtype, stored, array.astype("<f2") if dtype == "F16" else array)


def _layer(role: Role, blob: tuple[str, int], path: str | None = None) -> Layer:
    digest, size = blob
    return Layer(role=role, digest=digest, size_bytes=size, path=path)


def _check_float(tensor: RawTensor) -> None:
    if tensor.dtype not in FLOATS:
        raise InputError(
            f"{tensor.name!r} is stored as {tensor.dtype}. Use a model in {', '.join(sorted(FLOATS))}."
        )
    if not tensor.all_finite():
        raise InputError(f"{tensor.name!r} holds NaN or infinity. Use a model whose weights are finite.")
