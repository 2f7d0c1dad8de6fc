"""A strict reader and a streaming writer of the safetensors format (FORMAT 4.1).

Any safetensors library can read the files that we write. Our reader accepts fewer files than a
library does: the header must be canonical, the tensors must fill the file without gaps, and only a
few dtypes are allowed. It maps the file, so a tensor takes memory only when it is touched.

The reader checks structure. The modules that read a layer check its numbers.

The safetensors library was considered. It accepts headers that are not canonical, so we would parse
the header twice. Its `save_file` needs all tensors of a layer in memory.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from permille.digests import JSON, parse_canonical
from permille.errors import InputError, PackageError
from permille.package.blobs import CHUNK_BYTES, BlobFolder
from permille.package.limits import MAX_HEADER_BYTES, MAX_LAYER_BYTES
from permille.tensors import ITEM_BYTES, RawTensor, safetensors_header

_METADATA: JSON = {"format": "pt"}
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The entry of a tensor in the header. `begin` and `end` count from the first data byte."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A mapped file with a checked structure. Tensors are views, so keep this object while you use
    them.

    Example:

        layer = SafetensorsFile(Path("dense.safetensors"))
        for name in layer.names:
            print(name, layer.tensor(name).shape)
    """

    def __init__(self, path: Path, *, dtypes: Iterable[str] = ITEM_BYTES) -> None:
        """Map the file and check its header.

        Args:
            dtypes: the allowed dtypes.

        Raises:
            PackageError: a rule of FORMAT 4.1 is broken. The code says which.
            OSError: the file cannot be opened.
        """
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(file, size)
            self._start = 8 + len(header)
            self.specs = _parse_header(header, frozenset(dtypes), size - self._start)
            # The map outlives the file descriptor, so the file need not stay open.
            self._map = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of their data in the file."""
        return tuple(self.specs)

    def tensor(self, name: str) -> RawTensor:
        """Return a view of one tensor. Raises KeyError for an unknown name."""
        spec = self.specs[name]
        data = self._map[self._start + spec.begin : self._start + spec.end]
        return RawTensor(name=name, dtype=spec.dtype, shape=spec.shape, data=data)


def _read_header(file: BinaryIO, size: int) -> bytes:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise PackageError("header-size", f"expected 8 bytes of header length, got {len(prefix)}")
    length = int.from_bytes(prefix, "little")
    # Check the length before the header is read: a forged length could ask for terabytes.
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8) or length % 8:
        raise PackageError(
            "header-size",
            f"expected a multiple of 8 bytes within {MAX_HEADER_BYTES} and the file, got {length}",
        )
    return file.read(length)


def _parse_header(header: bytes, dtypes: frozenset[str], data_bytes: int) -> dict[str, TensorSpec]:
    text = header.rstrip(b" ")
    # FORMAT 4.1: spaces pad the header to a multiple of 8, so there are at most 7.
    if len(header) - len(text) >= 8:
        raise PackageError("header-size", f"expected at most 7 spaces, got {len(header) - len(text)}")
    entries = parse_canonical(text, MAX_HEADER_BYTES)
    if not isinstance(entries, dict) or entries.pop("__metadata__", None) != _METADATA:
        raise PackageError("header-schema", 'expected an object with __metadata__ {"format":"pt"}')
    specs = {name: _spec(name, entry, dtypes) for name, entry in entries.items()}
    ordered = dict(sorted(specs.items(), key=_position))
    _check_offsets(ordered, data_bytes)
    return ordered


def _position(item: tuple[str, TensorSpec]) -> tuple[int, int, int, str]:
    # An empty tensor begins and ends where the next tensor begins. Several empty tensors at one position are
    # ordered by the size of their dtype (largest first), then by name.
    name, spec = item
    return spec.begin, spec.end, -ITEM_BYTES[spec.dtype], name


def _spec(name: str, entry: JSON, dtypes: frozenset[str]) -> TensorSpec:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise PackageError("header-schema", f"expected dtype, shape and data_offsets of {name!r:.100}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise PackageError("header-dtype", f"expected one of {sorted(dtypes)}, got {dtype!r:.40}")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMENSIONS or not _is_sizes(offsets) or len(offsets) != 2:
        raise PackageError("header-schema", f"expected sizes in shape and data_offsets of {name!r:.100}")
    # FORMAT 4.1: the product must not overflow. Python's integers never do, so check the result instead.
    size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if size_bytes > MAX_LAYER_BYTES:
        raise PackageError("header-overflow", f"expected at most {MAX_LAYER_BYTES} bytes, got {size_bytes}")
    if offsets[1] - offsets[0] != size_bytes:
        got = offsets[1] - offsets[0]
        raise PackageError("header-offsets", f"expected {size_bytes} bytes of {name!r:.100}, got {got}")
    return TensorSpec(dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])


def _is_sizes(value: JSON) -> bool:
    # `type`, not `isinstance`: True must not pass for a size.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_offsets(specs: Mapping[str, TensorSpec], data_bytes: int) -> None:
    position = 0
    widest = max(ITEM_BYTES.values())
    for name, spec in specs.items():
        # Each byte belongs to exactly one tensor. So nothing can hide in gaps, and tensors cannot
        # overlap.
        if spec.begin != position:
            raise PackageError("header-offsets", f"expected {name!r:.100} at {position}, got {spec.begin}")
        # FORMAT 4.1: tensors are sorted by the size of their dtype, largest first. So each tensor begins at
        # a multiple of that size.
        if ITEM_BYTES[spec.dtype] > widest:
            raise PackageError("header-offsets", f"expected wider items before narrower, got {name!r:.100}")
        widest, position = ITEM_BYTES[spec.dtype], spec.end
    if position != data_bytes:
        raise PackageError("layer-file-size", f"expected {position} bytes of tensors, got {data_bytes}")


class SafetensorsWriter(ExitStack):
    """A writer of one layer, tensor by tensor. `finish` assembles the blob.

    In a layer, the header comes first, and then the tensors by the size of their dtype. So the bytes
    wait in unnamed temporary files, one for each size of dtype. Until `finish` returns, this takes
    twice the layer's size on disk.

    Example:

        with SafetensorsWriter(blobs) as writer:
            writer.add("model.norm.weight", "F32", (64,), np.ones(64, np.float32))
            digest, size_bytes = writer.finish()
    """

    def __init__(self, blobs: BlobFolder) -> None:
        super().__init__()
        self._blobs = blobs
        self._spools: dict[int, BinaryIO] = {}
        self._entries: dict[str, tuple[str, tuple[int, ...]]] = {}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.generic]) -> None:
        """Append a tensor.

        Args:
            data: C-contiguous and little-endian, with as many bytes as dtype and shape say.

        Raises:
            InputError: the name was added before or is `__metadata__`, the dtype is unknown, or the bytes do
                not fit the shape.
            OSError: from the file system.
        """
        if name == "__metadata__":
            raise InputError("No tensor may have the name '__metadata__', which the header uses.")
        if name in self._entries:
            raise InputError(f"The tensor {name!r} was added before. Add each tensor once.")
        if dtype not in ITEM_BYTES:
            raise InputError(f"expected dtype of {name!r} to be one of {sorted(ITEM_BYTES)}, got {dtype!r}")
        # Write the bytes of the array, whatever its dtype: numpy has no bfloat16, so callers pass such
        # tensors as raw bytes.
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        width = ITEM_BYTES[dtype]
        if flat.size != math.prod(shape) * width:
            raise InputError(f"expected {math.prod(shape) * width} bytes of {name!r}, got {flat.size}")
        if width not in self._spools:
            spool = tempfile.TemporaryFile(dir=self._blobs.incoming())  # noqa: SIM115 - `close` closes it
            self._spools[width] = self.enter_context(spool)
        self._spools[width].write(flat.data)
        self._entries[name] = (dtype, shape)

    def finish(self) -> tuple[str, int]:
        """Write the blob. Return its digest and its size in bytes."""
        header = self._header()
        with self._blobs.writer() as writer:
            writer.write(header)
            for width in sorted(self._spools, reverse=True):
                spool = self._spools[width]
                spool.seek(0)
                while chunk := spool.read(CHUNK_BYTES):
                    writer.write(chunk)
            return writer.commit(), writer.size_bytes

    def _header(self) -> bytes:
        ordered = {
            name: entry
            for width in sorted(self._spools, reverse=True)
            for name, entry in self._entries.items()
            if ITEM_BYTES[entry[0]] == width
        }
        header = safetensors_header(ordered)
        if len(header) - 8 > MAX_HEADER_BYTES:
            raise InputError(
                f"The layer's header would have {len(header) - 8} bytes, more than {MAX_HEADER_BYTES}."
            )
        return header
