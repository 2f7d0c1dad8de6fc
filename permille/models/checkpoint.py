"""Reader of a model folder of transformers, without torch. It also computes a digest of the contents.

    checkpoint = Checkpoint(Path("SmolLM2-135M-Instruct"))
    checkpoint.float32("model.norm.weight")

The folder is untrusted input. Only weights and files of an allow-list are read, and no symbolic link may lead
out of the folder. Weights must be safetensors (`permille.models.conversion` makes them from pickles). Every
size is checked before use. The tensors must be exactly those that the config asks for. Weight files are
mapped into memory, and never copied as a whole.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from permille.digests import canonical_json, digest_of, digest_of_file, finite_number
from permille.errors import InputError
from permille.files import follow_inside
from permille.models.config_keys import kept_settings
from permille.models.descriptions import Family
from permille.models.families import canonical_name, expected_tensors, family_of, scoped_tensors, text_config
from permille.tensors import RawTensor, release

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The files of a model folder that are read, copied or downloaded. None of them is code.
TEXT_FILES = (
    CONFIG_FILE,
    INDEX_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "LICENSE",
)

_ADAPTER_FILE = "adapter_config.json"
_AGAIN = "Download the model again."
_IF_MISSING = {
    CONFIG_FILE: "Name a folder that transformers saved, or a GGUF file.",
    "tokenizer.json": "Save the model's tokenizer there (`tokenizer.save_pretrained`).",
}
# A clone without git-lfs has text files in place of the weights. They begin with these bytes.
_LFS_POINTER = b"version https://git-lfs"
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# Python needs thirty times as much memory for parsed JSON. A model of 126 layers has a header of 150 kB.
_LARGEST_HEADER = 8 << 20
_LARGEST_INDEX = 8 << 20
_LARGEST_CONFIG = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Position of a tensor: `size` bytes from offset `begin` of a file in the folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


class Checkpoint:
    """A checked model folder. Tensors have canonical names, in the order of `expected_tensors`.

    Attributes:
        has_weights: whether the folder holds the weights, as `from_pretrained` needs it.
    """

    has_weights = True

    def __init__(self, folder: Path) -> None:
        """Read config and headers. Of a model with vision, keep only the text model.

        Raises:
            InputError: a file is missing, malformed or leads out of the folder, the family is unknown, or the
                tensors are not those of the config.
        """
        self.folder = folder
        _check_folder(folder)
        self.config = read_config(folder)
        self.family: Family = family_of(self.config)
        self._maps: dict[str, NDArray[np.uint8]] = {}
        found = self._headers()
        expected = expected_tensors(self.config)
        _compare({name: entry.shape for name, entry in found.items()}, expected)
        # Use the order of `expected_tensors`, which defines the tensor ids. The files may have another order.
        self._entries = {name: _checked(name, found[name]) for name in expected}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the canonical names of all tensors."""
        return tuple(self._entries)

    @property
    def parameters(self) -> int:
        """Return the number of weights. A tied head counts once."""
        return sum(math.prod(entry.shape) for entry in self._entries.values())

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(entry.size for entry in self._entries.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raise KeyError for a name that is not in `names`."""
        return self._entries[name].shape

    def place(self, name: str) -> Entry:
        """Return the position of a tensor's bytes."""
        return self._entries[name]

    def raw(self, name: str) -> RawTensor:
        """Return a tensor in the model's own dtype, as a view of the mapped file."""
        entry = self._entries[name]
        mapped = self._map(entry.file)
        release(mapped)  # so a caller that goes from tensor to tensor holds only one in memory
        data = mapped[entry.begin : entry.begin + entry.size]
        return RawTensor(name=name, dtype=entry.dtype, shape=entry.shape, data=data)

    def float32(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32. The conversion is exact."""
        return self.raw(name).float32()

    def file(self, name: str, *, limit: int) -> bytes | None:
        """Return the bytes of a small file, or None if the folder does not have it.

        Raises:
            InputError: it has more than `limit` bytes, or leads out of the folder.
        """
        if not (self.folder / name).exists():
            return None
        path = inside(self.folder, name)
        size = path.stat().st_size
        if size > limit:
            raise InputError(f"{name} is larger than {limit} bytes: {size}")
        return path.read_bytes()

    def weights(self, scope: str = "all") -> "ScopedWeights":
        """Return the linear layers in scope as float32. Each access reads one of them from its file."""
        return ScopedWeights(self, tuple(name for name, _ in scoped_tensors(self.config, scope)))

    def files(self) -> tuple[str, ...]:
        """Return the names of the model's files, sorted: weights, configs, tokenizer."""
        weights = {entry.file for entry in self._entries.values()}
        return tuple(sorted(weights | {name for name in TEXT_FILES if (self.folder / name).exists()}))

    def digest(self) -> str:
        """Return a digest of names and contents of `files()`. It is the same on every machine."""
        contents = {name: self._digest_of(name) for name in self.files()}
        # Digests of other kinds of data have another prefix, so they never equal this digest.
        return digest_of(b"permille-model-1\0" + canonical_json(contents))

    def _digest_of(self, name: str) -> str:
        return digest_of_file(inside(self.folder, name))

    def _headers(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for file in _weight_files(self.folder):
            for stored, entry in _read_header(self.folder, file).items():
                name = canonical_name(self.config, stored)
                if name is None:
                    continue  # the model does not use this tensor
                if name in found:
                    raise InputError(f"The tensor {name} occurs twice, the second time in {file}.")
                found[name] = entry
        return found

    def _map(self, file: str) -> NDArray[np.uint8]:
        if file not in self._maps:
            self._maps[file] = np.memmap(inside(self.folder, file), np.uint8, mode="r")
        return self._maps[file]


class ScopedWeights(Mapping[str, NDArray[np.float32]]):
    """Weights [out_features, in_features] by name, in tensor_id order. Each access reads the tensor again."""

    def __init__(self, checkpoint: Checkpoint, names: tuple[str, ...]) -> None:
        self._checkpoint = checkpoint
        self._names = names

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return self._checkpoint.float32(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a model folder. For a model with vision, return that of its text model.

    Keys that are not on the list of `config_keys.py` are left out.

    Raises:
        InputError: the file is missing, malformed or leads out of the folder, or the family is unknown.
    """
    config = text_config(_read_json(folder, CONFIG_FILE, _LARGEST_CONFIG))
    # This also checks keys that are not kept: they say that a model is quantized or a mixture.
    family_of(config)
    return kept_settings(config)


def inside(folder: Path, name: str) -> Path:
    """Return the real path of a file directly in `folder`.

    Raises:
        InputError: the name is no bare file name, the file does not exist, or a symbolic link leads out of
            the folder.
    """
    # Names of weight files come from the folder's own index, which is untrusted.
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise InputError(f"expected a bare file name, got {name!r:.200}")
    path = _followed(folder, name)
    if path is None:
        raise InputError(f"{name} in {folder.name} is a link that leads out of it. Copy the file itself.")
    if not path.is_file():
        raise InputError(f"{folder.name} has no file {name}. {_IF_MISSING.get(name, _AGAIN)}")
    return path


def _followed(folder: Path, name: str) -> Path | None:
    """Return the real path of a file in `folder`, or None if a link leads out.

    In the cache of the hub, files of a snapshot are links to the folder `blobs` of the same repository.
    """
    path = follow_inside(folder, name)
    if path is not None or folder.parent.name != "snapshots":
        return path
    cache = folder.resolve().parent.parent
    found = follow_inside(cache, f"snapshots/{folder.name}/{name}")
    return found if found is not None and found.parent == cache / "blobs" else None


def _check_folder(folder: Path) -> None:
    """Check that no file makes other libraries read outside of the folder.

    Raises:
        InputError: a link leads out of the folder, or there is an adapter, which names a base model.
    """
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and _followed(folder, path.name) is None:
            raise InputError(
                f"{path.name} in {folder.name} is a link that leads out of it. Copy the file itself."
            )
    # transformers would load the base model that the adapter names, wherever that is.
    if (folder / _ADAPTER_FILE).exists():
        raise InputError(f"{folder.name} holds an adapter ({_ADAPTER_FILE}), no whole model. Merge it first.")


def _read_json(folder: Path, name: str, limit: int) -> dict[str, Any]:
    path = inside(folder, name)
    if path.stat().st_size > limit:
        raise InputError(f"{name} is larger than {limit} bytes: {path.stat().st_size}")
    return _parse_object(path.read_bytes(), name)


def _parse_object(data: bytes, what: str) -> dict[str, Any]:
    try:
        # Python's parser also accepts NaN, Infinity and 1e999, which no setting may be.
        value = json.loads(data, parse_constant=finite_number, parse_float=finite_number)
    except (ValueError, RecursionError) as exc:
        raise InputError(f"{what} is not valid JSON: {exc}. {_AGAIN}") from exc
    if not isinstance(value, dict):
        raise InputError(f"{what} must hold a JSON object, got {type(value).__name__}. {_AGAIN}")
    return value


def _weight_files(folder: Path) -> list[str]:
    if (folder / WEIGHTS_FILE).exists():  # preferred to the index, as in transformers
        return [WEIGHTS_FILE]
    if (folder / INDEX_FILE).exists():
        mapped = _read_json(folder, INDEX_FILE, _LARGEST_INDEX).get("weight_map")
        files = list(mapped.values()) if isinstance(mapped, dict) else []
        if not files or not all(isinstance(file, str) and file.endswith(".safetensors") for file in files):
            raise InputError(f"{INDEX_FILE} has no weight_map of .safetensors files.")
        # An index names a file once for each of its tensors.
        return sorted(set(files))
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    raise InputError(
        f"{folder.name} has neither {WEIGHTS_FILE} nor {INDEX_FILE}. "
        + (f"It has {', '.join(pickles)}. Only jobs, such as builds, convert pickles." if pickles else _AGAIN)
    )


def _read_header(folder: Path, file: str) -> dict[str, Entry]:
    path = inside(folder, file)
    size = path.stat().st_size
    with path.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise InputError(
                f"{file} is a pointer of git-lfs, not the weights. Run `git lfs pull` in the folder."
            )
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        # Check the length before the header is read: a forged one could ask for terabytes.
        if size < 8 or not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise InputError(
                f"{file} is no safetensors file, or is cut off: expected a header of at most "
                f"{_LARGEST_HEADER} bytes that ends within the file. {_AGAIN}"
            )
        header = _parse_object(stream.read(length), f"the header of {file}")
    # `__metadata__` is no tensor, but free text of the program that wrote the file.
    header.pop("__metadata__", None)
    return {name: _entry(file, name, value, 8 + length, size) for name, value in header.items()}


def _entry(file: str, name: str, value: object, start: int, file_size: int) -> Entry:
    value = value if isinstance(value, dict) else {}
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise InputError(f"{file}: expected shape and data_offsets of {name!r:.200}")
    if not isinstance(dtype, str):
        raise InputError(f"{file}: expected a dtype of {name!r:.200}")
    begin, end = start + offsets[0], start + offsets[1]
    # Buffers of other types, such as old causal masks, are allowed. Tensors of the model must be floats.
    width = _DTYPE_BYTES.get(dtype)
    if end > file_size or begin > end or (width and math.prod(shape) * width != end - begin):
        raise InputError(
            f"{file} is damaged or cut off: the bytes of {name!r:.200} must lie inside the file, and their "
            f"number must match the shape. {_AGAIN}"
        )
    return Entry(file=file, dtype=dtype, shape=tuple(shape), begin=begin, size=end - begin)


def _checked(name: str, entry: Entry) -> Entry:
    if entry.dtype not in _DTYPE_BYTES:
        raise InputError(
            f"{name}: expected F32, F16 or BF16, got {entry.dtype:.20}. Use the model in full precision, not "
            "a quantized copy."
        )
    return entry


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list) and len(value) <= 8 and all(type(item) is int and item >= 0 for item in value)
    )


def _compare(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    # Compare names first, because a wrong shape says little if tensors are missing.
    for what, names in (
        ("missing", expected.keys() - found.keys()),
        ("unknown", found.keys() - expected.keys()),
    ):
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise InputError(f"The tensors do not match config.json: {len(names)} {what}: {shown}. {_AGAIN}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise InputError(
                f"{name}: expected shape {shape} by the config, got {found[name]}. config.json and the "
                f"weights belong to different models. {_AGAIN}"
            )
