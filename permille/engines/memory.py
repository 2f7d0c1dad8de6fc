"""A memory: keys and values of a person's text in 8 bits, kept beside a state (FORMAT 15).

    path.write_bytes(encode_memory(package, state_digest, known))
    known = decode_memory(package, state_digest, path.read_bytes())

Text can be reconstructed from keys and values (arXiv 2508.09442), and a memory names its tokens anyway. So it
is treated like the notes that it was made from, and never leaves the device.

The numbers of a head at a token share a scale, the largest of their magnitudes divided by 127. On two models,
storing a memory in 8 bits changed the loss by 0.001 nats (docs/adr/0040).

# Legend: S tokens, B key-value heads, D numbers of a head.
"""

import hashlib
import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from permille.digests import JSON, canonical_json, parse_canonical
from permille.engines.key_values import KeyValues
from permille.errors import PackageError
from permille.models.families import shape_of
from permille.package.reader import Package

Array = NDArray[np.float32]

MAX_TOKENS = 8192
"""The largest number of positions of a memory."""
MOST_BYTES = 256 << 20
"""The largest memory that a run makes, in float32, as the engine keeps it. Its file has a quarter of this."""
_MAGIC = b"PMLMEM1\n"
_HEAD = struct.Struct("<8sI")
_DIGEST_BYTES = 32
_MAX_HEADER_BYTES = 1024


def encode_memory(package: Package, state: str | None, known: KeyValues) -> bytes:
    """Encode a memory.

    Args:
        package: the package whose model computed it.
        state: digest of the state whose values the model had. None is the base.
        known: keys and values of 1 to `MAX_TOKENS` tokens.
    """
    header = canonical_json(_header(package, state, len(known)))
    parts = [_HEAD.pack(_MAGIC, len(header)), header, known.id_S.astype("<u4").tobytes()]
    parts += [part for pair in known.layers for x_SBD in pair for part in _coded(x_SBD)]
    data = b"".join(parts)
    return data + hashlib.sha256(data).digest()


def decode_memory(package: Package, state: str | None, data: bytes) -> KeyValues:
    """Read a memory, with keys and values in float32.

    Args:
        package: the package that it must belong to.
        state: digest of the state that it must belong to.
        data: the bytes, at most `largest_memory(package)`.

    Raises:
        PackageError: `memory-limit`, `memory-corrupt`, `memory-header`, `memory-content` or `memory-binding`
            (FORMAT 15.3).
    """
    if len(data) > largest_memory(package):
        raise PackageError(
            "memory-limit", f"The memory has {len(data)} bytes, more than any of this package."
        )
    # Check the digest first, so that everything below reads the bytes as they were written.
    end = len(data) - _DIGEST_BYTES
    if end < _HEAD.size or hashlib.sha256(data[:end]).digest() != data[end:]:
        raise PackageError(
            "memory-corrupt", f"The memory is damaged: its {len(data)} bytes have another digest."
        )
    magic, size = _HEAD.unpack_from(data)
    first = _HEAD.size + size
    if magic != _MAGIC or first > end:
        raise PackageError("memory-header", f"A memory begins with {_MAGIC!r} and a header, not {magic!r}.")
    found, tokens = _parsed(data[_HEAD.size : first])
    if found != (wanted := _header(package, state, tokens)):
        raise PackageError("memory-binding", f"The memory belongs to another model: {found}, not {wanted}.")
    if end - first != tokens * _token_bytes(package):
        raise PackageError("memory-content", f"The memory has {end - first} bytes for {tokens} tokens.")
    return _decoded(package, tokens, memoryview(data)[first:end])


def most_positions(package: Package) -> int:
    """Return the largest number of positions of a memory that takes at most `MOST_BYTES` in float32."""
    layers, heads, head = _shape(package)
    return min(MAX_TOKENS, MOST_BYTES // (2 * 4 * layers * heads * head))


def largest_memory(package: Package) -> int:
    """Return the largest number of bytes of a memory of a package."""
    return MAX_TOKENS * _token_bytes(package) + _HEAD.size + _MAX_HEADER_BYTES + _DIGEST_BYTES


def _header(package: Package, state: str | None, tokens: int) -> dict[str, JSON]:
    return {
        "format": "permille-memory",
        "package_digest": package.digest,
        "state_digest": state,
        "tokens": tokens,
        "version": 1,
    }


def _parsed(header: bytes) -> tuple[dict[str, JSON], int]:
    """Return the header of a memory, and its number of tokens."""
    try:
        found = parse_canonical(header, _MAX_HEADER_BYTES)
    except PackageError as exc:
        raise PackageError("memory-header", str(exc)) from exc
    # `_header` writes the other keys, so the comparison with it checks them.
    if isinstance(found, dict) and found.get("format") == "permille-memory":
        tokens, version = found.get("tokens"), found.get("version")
        # In Python, True is equal to 1.
        if type(version) is int and version == 1 and type(tokens) is int and 1 <= tokens <= MAX_TOKENS:
            return found, tokens
    raise PackageError("memory-header", f"This is no header of a memory: {found!r:.300}")


def _shape(package: Package) -> tuple[int, int, int]:
    """Return the numbers of layers, of key-value heads and of numbers in a head."""
    # A model that only torch computes has no memory, but it has this shape.
    shape = shape_of(package.config)
    return shape.layers, shape.kv_heads, shape.head


def _token_bytes(package: Package) -> int:
    layers, heads, head = _shape(package)
    return 4 + 2 * layers * heads * (4 + head)


def _coded(x_SBD: Array) -> Iterator[bytes]:
    """Yield the bytes of the scales, and those of the codes."""
    scale_SB1 = np.abs(x_SBD).max(axis=2, keepdims=True) / np.float32(127)
    # Where all numbers are 0, the scale is 0 and any divisor gives the codes 0.
    code_SBD = np.rint(x_SBD / np.where(scale_SB1 > 0, scale_SB1, 1))
    yield scale_SB1.astype("<f4").tobytes()
    yield np.clip(code_SBD, -127, 127).astype(np.int8).tobytes()


def _decoded(package: Package, tokens: int, data: memoryview) -> KeyValues:
    layers, heads, head = _shape(package)
    id_S = np.frombuffer(data[: 4 * tokens], "<u4").astype(np.int64)
    of_scales, position = 4 * tokens * heads, 4 * tokens

    def next_array() -> Array:
        nonlocal position
        scale_SB1 = np.frombuffer(data[position : position + of_scales], "<f4").reshape(tokens, heads, 1)
        position += of_scales
        count = tokens * heads * head
        code_SBD = np.frombuffer(data[position : position + count], np.int8).reshape(tokens, heads, head)
        position += count
        if not (np.isfinite(scale_SB1) & (scale_SB1 >= 0)).all() or (code_SBD == -128).any():
            raise PackageError("memory-content", "Scales are finite and not negative, and codes above -128.")
        x_SBD: Array = np.multiply(code_SBD, scale_SB1, dtype=np.float32)
        return x_SBD

    pairs = tuple((next_array(), next_array()) for _ in range(layers))
    if int(id_S.max()) >= int(package.config["vocab_size"]):
        raise PackageError("memory-content", f"The memory has the token {id_S.max()}, which the model lacks.")
    return KeyValues(id_S=id_S, layers=pairs)
