"""The two optional layers that help a device choose directions: exponents and basis (FORMAT 4.7, 4.8).

Both hold small integers for each masked weight, so that a direction made with them stays a vector of
integers. Both are written from, and read into, one array in flat order.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_BASIS_RANK, MAX_EXPONENT, MEDIA_TYPES, Role
from permille.package.manifest import Layer, TensorInfo
from permille.package.safetensors_io import SafetensorsFile, SafetensorsWriter


def write_exponents(blobs: BlobFolder, exponents_K: NDArray[np.int8], counts: Mapping[str, int]) -> Layer:
    """Write the exponents layer.

    Args:
        exponents_K: [k] in flat order, from 0 to `MAX_EXPONENT`, the smallest 0.
        counts: masked weights by tensor, in tensor_id order.

    Raises:
        InputError: another dtype, size or range.
        OSError: as the file system reports it; no blob is left.
    """
    _check_array(exponents_K, (sum(counts.values()),))
    try:
        check_exponents(exponents_K)
    except PackageError as exc:
        raise InputError(str(exc)) from exc
    return _write(blobs, Role.EXPONENTS, exponents_K, counts)


def write_basis(blobs: BlobFolder, basis_KR: NDArray[np.int8], counts: Mapping[str, int]) -> Layer:
    """Write the basis layer.

    Args:
        basis_KR: [k, r] in flat order, from -127 to 127, r from 1 to `MAX_BASIS_RANK`, no column all 0.
        counts: masked weights by tensor, in tensor_id order.

    Raises:
        InputError: another dtype, size or range.
        OSError: as the file system reports it; no blob is left.
    """
    rank = basis_KR.shape[1] if basis_KR.ndim == 2 else 0
    if not 1 <= rank <= MAX_BASIS_RANK:
        raise InputError(f"expected a basis [k, 1 to {MAX_BASIS_RANK}], got shape {basis_KR.shape}")
    _check_array(basis_KR, (sum(counts.values()), rank))
    try:
        check_basis(basis_KR)
    except PackageError as exc:
        raise InputError(str(exc)) from exc
    return _write(blobs, Role.BASIS, basis_KR, counts)


def read_flat(layer: SafetensorsFile, tensors: Sequence[TensorInfo]) -> NDArray[np.int8]:
    """All tensors of a checked layer as one array in flat order, [k] or [k, r]; the caller's own copy."""
    found = [layer.tensor(tensor.name) for tensor in tensors]
    return np.concatenate([tensor.data.view(np.int8).reshape(tensor.shape) for tensor in found])


def rank_of(layer: SafetensorsFile, first: str) -> int:
    """The rank that a basis layer's tensor `first` announces; the others must have it too.

    Raises:
        PackageError: `tensor-names` or `tensor-shape`.
    """
    spec = layer.specs.get(first)
    if spec is None:
        raise PackageError("tensor-names", f"expected {first} in basis, got none")
    if len(spec.shape) != 2 or not 1 <= spec.shape[1] <= MAX_BASIS_RANK:
        expected = f"[count, 1 to {MAX_BASIS_RANK}]"
        raise PackageError("tensor-shape", f"expected {expected} of {first} in basis, got {spec.shape}")
    return spec.shape[1]


def check_exponents(exponents_K: NDArray[np.int8]) -> None:
    """FORMAT 4.7: from 0 to 15, the smallest 0.

    Raises:
        PackageError: `exponents-range`.
    """
    least, most = int(exponents_K.min()), int(exponents_K.max())
    if least != 0 or most > MAX_EXPONENT:
        raise PackageError(
            "exponents-range", f"expected exponents from exactly 0 to {MAX_EXPONENT}, got {least} to {most}"
        )


def check_basis(basis_KR: NDArray[np.int8]) -> None:
    """FORMAT 4.8: from -127 to 127, no column all 0.

    Raises:
        PackageError: `basis-range` or `basis-column`.
    """
    if int(basis_KR.min()) < -127:
        raise PackageError("basis-range", "expected numbers of a basis from -127 to 127, got -128")
    empty = np.flatnonzero(~basis_KR.any(axis=0))
    if empty.size:
        raise PackageError("basis-column", f"expected a number in every column, got none in {int(empty[0])}")


def _check_array(array: NDArray[np.int8], shape: tuple[int, ...]) -> None:
    if array.dtype != np.int8 or array.shape != shape or not array.size:
        raise InputError(f"expected int8 {shape}, got {array.dtype} {array.shape}")


def _write(blobs: BlobFolder, role: Role, array: NDArray[np.int8], counts: Mapping[str, int]) -> Layer:
    with SafetensorsWriter(blobs) as writer:
        for name, part in _parts(array, counts):
            writer.add(name, "I8", part.shape, part)
        digest, size = writer.finish()
    return Layer(role=role, media_type=MEDIA_TYPES[role], digest=digest, size_bytes=size)


def _parts(array: NDArray[np.int8], counts: Mapping[str, int]) -> Iterator[tuple[str, NDArray[np.int8]]]:
    start = 0
    for name, count in counts.items():
        yield name, array[start : start + count]
        start += count
