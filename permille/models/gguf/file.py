"""A strict reader of a GGUF file's header: metadata, and the position of each tensor.

The file is untrusted, may be truncated, and may claim anything. Every count, length and offset is checked
against a limit and the file's size before it is used. Memory is allocated only for bytes that the file has,
never for a count that it claims. The header is read, not mapped: a file that is cut while it is mapped would
end the process. Tensors are mapped one by one. The reader of the `gguf` package trusts the counts, so only
that package's tables and dequantizers are used here.
"""

import os
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from permille.errors import InputError

TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
)
"""The types of tensors that are read. A file with another type is refused, and the message names the type."""

OTHERWISE = "Take the model as transformers has it, from a folder or the hub"
"""Advice for a file whose model may be available in another form."""

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Gemma has the largest lists that we know: 262,144 tokens, and some 580,000 merges.
_MOST_KEYS, _MOST_TENSORS, _MOST_ITEMS = 4096, 1 << 16, 4 << 20
_MOST_BYTES = 8 << 20  # in one text
# The `struct` codes of scalar types, by the number that GGUF gives to each type.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = GGUFValueType.STRING, GGUFValueType.ARRAY


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor of the file.

    Attributes:
        type: the GGUF type.
        shape: the shape in numpy's order, rows first.
        begin: the offset of its bytes in the file.
        size: the number of its bytes.
    """

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    size: int


class GgufFile:
    """An open file whose header was checked."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            InputError: the file is no GGUF file of version 2 or 3, is truncated, or has a number out of
                range.
            OSError: the file cannot be opened.
        """
        file = path.open("rb")
        # The file stays open, so that tensors come from it even if another file takes its name.
        weakref.finalize(self, file.close)
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        # Magic, version and two counts take 4 + 4 + 8 + 8 bytes.
        if self._size < 24:
            raise InputError(f"{path.name} is no GGUF file: it has {self._size} bytes. Download it again.")
        reader = _Reader(file, self._size, path.name)
        if reader.take(4) != _MAGIC:
            raise InputError(
                f"{path.name} is no GGUF file: it does not begin with GGUF. For a model that transformers "
                "saved, name the folder."
            )
        version = reader.number("I")
        if version not in _VERSIONS:
            raise InputError(f"{path.name} is GGUF version {version}; versions 2 and 3 are read.")
        tensors = reader.count("tensors", _MOST_TENSORS)
        keys = reader.count("keys of metadata", _MOST_KEYS)
        self.name = path.name
        self.metadata: Mapping[str, Any] = reader.metadata(keys)
        # The type of each value, and for a list that of its items.
        self.types: Mapping[str, tuple[GGUFValueType, GGUFValueType | None]] = reader.types
        self.tensors: Mapping[str, TensorPlace] = self._places(reader, tensors)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string of the metadata.

        Raises:
            InputError: the value is no text, or the key is missing and there is no default.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.refused(f"has no text {key!r}")
        return value

    def refused(self, why: str) -> InputError:
        """Return an error that names this file."""
        return InputError(f"{self.name} {why}.")

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes in the row order of the file, as [rows, bytes of a row]."""
        place = self.tensors[name]
        found: NDArray[np.uint8] = np.memmap(
            self._file, np.uint8, mode="r", offset=place.begin, shape=place.size
        )
        return np.asarray(found).reshape(-1, place.size // max(1, int(np.prod(place.shape[:-1]))))

    def float32(self, name: str) -> NDArray[np.float32]:
        """Return a tensor's exact numbers. They may be NaN or infinite."""
        place = self.tensors[name]
        with np.errstate(all="ignore"):
            found = dequantize(self.raw(name), place.type).astype(np.float32, copy=False)
        return found.reshape(place.shape)

    def _places(self, reader: "_Reader", tensors: int) -> dict[str, TensorPlace]:
        alignment = self.metadata.get("general.alignment", 32)
        # ggml accepts powers of two only.
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self.refused(f"names an alignment of {alignment!r:.40}")
        found: dict[str, TensorPlace] = {}
        for _ in range(tensors):
            name = reader.text(1 << 10)
            shape, kind, offset = reader.tensor_info(name)
            if name in found:
                raise self.refused(f"has the tensor {name!r:.80} twice")
            found[name] = self._place(name, shape, kind, offset)
        # The data begins after all headers, so the offsets can be checked only now.
        start = -(-reader.at // alignment) * alignment
        placed: dict[str, TensorPlace] = {}
        for name, place in found.items():
            if place.begin % alignment or start + place.begin + place.size > self._size:
                raise self.refused(
                    f"is truncated or damaged: {name!r:.80} lies outside of it. Download it again"
                )
            placed[name] = TensorPlace(
                type=place.type, shape=place.shape, begin=start + place.begin, size=place.size
            )
        # A small file could name many tensors over the same bytes, and fill the disk when it is converted.
        in_order = sorted(placed.items(), key=lambda item: item[1].begin)
        for (_, before), (name, after) in pairwise(in_order):
            if after.begin < before.begin + before.size:
                raise self.refused(f"has {name!r:.80} over the bytes of another tensor")
        return placed

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorPlace:
        known = {each.value: each for each in GGMLQuantizationType}
        if kind not in known:
            raise self.refused(f"has {name!r:.80} in a type that GGUF does not name: {kind}")
        type_ = known[kind]
        if type_ not in TYPES:
            names = ", ".join(each.name for each in TYPES)
            raise self.refused(f"has {name!r:.80} as {type_.name}, which is not read. Use one of {names}")
        items, item_bytes = GGML_QUANT_SIZES[type_]
        if shape[-1] % items:
            raise self.refused(f"has {name!r:.80} with rows of {shape[-1]}, which are no whole blocks")
        elements = 1
        for length in shape:
            elements *= length
            if elements > 1 << 40:
                raise self.refused(f"has {name!r:.80} of more than 2^40 weights")
        return TensorPlace(type=type_, shape=shape, begin=offset, size=elements // items * item_bytes)


class _Reader:
    """A reader of numbers and texts that never asks for more bytes than the file has."""

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self._file = file
        self._size = size
        self._name = name
        self.at = 0
        self.types: dict[str, tuple[GGUFValueType, GGUFValueType | None]] = {}
        self._items = 0

    def take(self, size: int) -> bytes:
        found = self._file.read(size) if size <= self._size - self.at else b""
        # The file may also have been cut since its size was read.
        if len(found) < size:
            raise self._refused("is truncated. Download it again")
        self.at += size
        return found

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize(form)))[0]

    def count(self, what: str, most: int) -> int:
        found: int = self.number("Q")
        if found > most:
            raise self._refused(f"names {found} {what}, more than {most}")
        return found

    def text(self, most: int = _MOST_BYTES) -> str:
        # Tokens of some vocabularies are not UTF-8. They are refused when they are needed.
        return self.take(self.count("bytes of a text", most)).decode("utf-8", "surrogateescape")

    def metadata(self, keys: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text(1 << 10)
            if not key:
                raise self._refused("is damaged: a key of its metadata has no name. Download it again")
            # A repeated key has no defined meaning.
            if key in found:
                raise self._refused(f"has the key {key!r:.80} twice")
            found[key] = self._value(self.number("I"), key)
        return found

    def tensor_info(self, name: str) -> tuple[tuple[int, ...], int, int]:
        dimensions = self.number("I")
        if not 1 <= dimensions <= 4:
            raise self._refused(f"has {name!r:.80} of {dimensions} dimensions")
        # GGUF gives the length of a row first, and numpy gives it last.
        shape = tuple(self.count("rows of a tensor", 1 << 32) for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise self._refused(f"has {name!r:.80} without weights")
        return shape, self.number("I"), self.number("Q")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING or kind in _SCALARS:
            self.types[key] = GGUFValueType(kind), None
            return self.text() if kind == _STRING else self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._refused(f"has {key!r:.80} of a type that GGUF does not name: {kind}")
        items, number = self.number("I"), self.count("items of a list", _MOST_ITEMS)
        # Limit the sum over all lists, because an item takes more memory here than in the file.
        self._items += number
        if self._items > _MOST_ITEMS:
            raise self._refused(f"has lists of more than {_MOST_ITEMS} items together")
        if items != _STRING and items not in _SCALARS:
            raise self._refused(f"has {key!r:.80} as a list of lists")
        self.types[key] = _ARRAY, GGUFValueType(items)
        if items == _STRING:
            return [self.text() for _ in range(number)]
        form = np.dtype("<" + _SCALARS[items])
        return np.frombuffer(self.take(number * form.itemsize), form).tolist()

    def _refused(self, why: str) -> InputError:
        return InputError(f"{self._name} {why}.")
