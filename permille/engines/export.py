"""A package as a plain transformers folder: dequantized weights with the sparse values set, or an adapter
merged into them, nothing of ours.

Tensor by tensor: the memory needed is that of the largest one, where safetensors' own writer takes all at
once. The folder appears whole or not at all.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from permille.choices import choice_of
from permille.errors import InputError
from permille.files import fsync_folder, write_atomic
from permille.models.families import expected_tensors, shape_of
from permille.package.manifest import TensorInfo
from permille.package.reader import Package
from permille.quantization import dequantize
from permille.tensors import ITEM_BYTES, Q8_0, RawTensor

WEIGHTS_FILE = "model.safetensors"


class ExportDtype(StrEnum):
    """FLOAT32 is exact; MODEL rounds to the source model's dtype and may so swallow small changes."""

    FLOAT32 = "float32"
    MODEL = "model"


def export_transformers(
    package: Package,
    values_K: NDArray[np.float32] | None,
    folder: Path,
    *,
    dtype: ExportDtype | str = ExportDtype.FLOAT32,
) -> None:
    """Write a folder that unmodified transformers loads without any other package.

    Args:
        values_K: float32 [k] to set at the masked positions, or of the adapter; None takes the package's own.
        folder: must not exist, or be empty; its parent must exist.

    Raises:
        InputError: values of another shape or dtype or not finite, or a folder that holds something.
        OSError: as the file system reports it; no folder is left.
    """
    dtype = choice_of(ExportDtype, dtype, "a dtype")
    values_K = checked_values(package, values_K)
    with new_folder(folder) as temporary:
        _write_folder(package, values_K, temporary, dtype)


def checked_values(package: Package, values_K: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """The values to write: the package's own for None.

    Raises:
        InputError: another shape or dtype, or not finite.
    """
    values_K = package.values() if values_K is None else values_K
    if values_K.dtype != np.float32 or values_K.shape != (package.k,):
        raise InputError(
            f"expected values float32 [{package.k}], got {values_K.dtype} {list(values_K.shape)}"
        )
    if not np.isfinite(values_K).all():
        raise InputError("expected finite values, got NaN or infinity")
    return values_K


def adapter_matrices(
    package: Package, values_K: NDArray[np.float32]
) -> Iterator[tuple[TensorInfo, NDArray[np.float32], NDArray[np.float32]]]:
    """Yield the tensor, A [rank, K] and B [N, rank] of each linear in an adapter's scope."""
    start = 0
    for info in package.manifest.tensors:
        if info.count:
            a_RK, part = package.adapter_matrix(info.name), values_K[start : start + info.count]
            b_N = part[info.count - info.shape[0] * len(a_RK) :]
            trained = part[: info.count - len(b_N)]
            yield info, trained.reshape(a_RK.shape) if len(trained) else a_RK, b_N.reshape(-1, len(a_RK))
        start += info.count


def safetensors_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the header of a safetensors file, for tensors (dtype, shape) in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` where the block ends without an error, else is removed.

    Raises:
        InputError: `folder` holds something.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"expected a new or empty folder, {folder} holds files")
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
    try:
        yield temporary
        temporary.replace(folder)  # mode 0700, as it was made: a personal model is its user's alone
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(folder.parent)


def _write_folder(package: Package, values_K: NDArray[np.float32], folder: Path, dtype: ExportDtype) -> None:
    for name in package.manifest.files():
        if name != "config.json":
            write_atomic(folder / name, package.file(name))
    config = package.config
    if dtype is ExportDtype.FLOAT32:
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": "float32"}
    write_atomic(folder / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    with (folder / WEIGHTS_FILE).open("wb") as file:
        _write_weights(file, package, values_K, dtype)
        file.flush()
        os.fsync(file.fileno())


def _write_weights(
    file: BinaryIO, package: Package, values_K: NDArray[np.float32], dtype: ExportDtype
) -> None:
    """The safetensors format: header length, header, tensors one after the other."""
    shapes = expected_tensors(package.config)
    file.write(safetensors_header({x: (_dtype_of(package, x, dtype), shapes[x]) for x in _names(package)}))
    for tensor in _tensors(package, values_K):
        file.write(_encoded(tensor, _dtype_of(package, tensor.name, dtype)).data)


def _names(package: Package) -> list[str]:
    """The order of the tensors in the file: those that are quantized, then the others."""
    return [info.name for info in package.manifest.tensors] + list(package.plain_names)


def _dtype_of(package: Package, name: str, dtype: ExportDtype) -> str:
    if dtype is ExportDtype.FLOAT32:
        return "F32"
    if name in package.plain_names:
        return _source_dtype(package, package.plain_dtype(name))
    if package.manifest.adapter is None:
        return package.values_dtype(name)
    return _source_dtype(package, package.plain_dtype(f"{shape_of(package.config).about.embedding}.weight"))


def _source_dtype(package: Package, dtype: str) -> str:
    """The dtype itself; of a table in Q8_0 that of the model's other tensors, float32 where it has none."""
    if dtype != Q8_0:
        return dtype
    others = (package.plain_dtype(name) for name in package.plain_names)
    return next((other for other in others if other != Q8_0), "F32")


def _tensors(package: Package, values_K: NDArray[np.float32]) -> Iterator[RawTensor]:
    adapter, start = package.manifest.adapter, 0
    low_rank = iter(()) if adapter is None else adapter_matrices(package, values_K)
    for info in package.manifest.tensors:
        weight_NK = dequantize(package.quantized(info.name))
        if adapter is None:
            weight_NK.reshape(-1)[package.mask(info.name)] = values_K[start : start + info.count]
        elif info.count:
            _, a_RK, b_NR = next(low_rank)
            weight_NK += np.float32(adapter.scale) * (b_NR @ a_RK)
        start += info.count
        yield RawTensor(
            name=info.name, dtype="F32", shape=info.shape, data=weight_NK.reshape(-1).view(np.uint8)
        )
    for name in package.plain_names:
        yield package.plain(name)


def _encoded(tensor: RawTensor, dtype: str) -> NDArray[np.uint8]:
    """The tensor's bytes in `dtype`, rounded to nearest, ties to even, where it is coarser."""
    if tensor.dtype == dtype:
        return tensor.data
    number = np.ascontiguousarray(tensor.float32(), dtype="<f4").reshape(-1)
    if dtype == "F32":
        return number.view(np.uint8)
    if dtype == "F16":
        return number.astype("<f2").view(np.uint8)
    bits = number.view("<u4")
    rounded: NDArray[np.uint32] = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return rounded.astype("<u2").view(np.uint8)
