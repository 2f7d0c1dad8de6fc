"""Digests, and the canonical JSON that is hashed to name a value (FORMAT 1).

Canonical JSON has keys sorted by code point, no spaces, unescaped UTF-8, integers of 64 bits and no floats.
Real numbers are written as strings.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from permille.errors import PackageError

JSON: TypeAlias = "str | int | bool | Sequence[JSON] | Mapping[str, JSON] | None"

# The deepest nesting of a value. It is far below Python's limit of recursion, so an untrusted document cannot
# exhaust the stack.
MAX_DEPTH = 32
_INT_LIMIT = 2**63
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


def is_digest(text: object) -> bool:
    """Return whether `text` is a digest: "sha256:" and 64 lower-case hexadecimal digits."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of bytes.

    >>> digest_of(b"")[:15]
    'sha256:e3b0c442'
    """
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_bytes(digest: str) -> bytes:
    """Return the 32 bytes that a digest encodes."""
    return bytes.fromhex(digest.removeprefix("sha256:"))


def digest_of_file(path: Path) -> str:
    """Return the digest of a file. The file is read in pieces."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: JSON) -> bytes:
    """Return the canonical bytes of a value. Equal values have equal bytes.

    >>> canonical_json({"b": 1, "a": [True, None]})
    b'{"a":[true,null],"b":1}'

    Raises:
        TypeError: the value contains a float, or a type that JSON does not have.
        ValueError: an integer has more than 64 bits, a string has a lone surrogate, or the nesting is deeper
            than `MAX_DEPTH`.
    """
    _check(value, 0)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    # This raises for a lone surrogate, which UTF-8 cannot hold.
    return text.encode("utf-8")


def parse_canonical(data: bytes | memoryview, limit: int) -> JSON:
    """Parse canonical JSON, and refuse any other spelling of a value.

    Args:
        data: the bytes.
        limit: the largest size to accept.

    Raises:
        PackageError: `json-size`, `json-malformed` or `json-not-canonical`.
    """
    if len(data) > limit:
        raise PackageError("json-size", f"expected at most {limit} bytes, got {len(data)}")
    raw = bytes(data)
    try:
        value: JSON = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except (ValueError, RecursionError) as exc:
        raise PackageError("json-malformed", f"expected JSON without floats or repeated keys: {exc}") from exc
    try:
        expected = canonical_json(value)
    except (TypeError, ValueError) as exc:
        raise PackageError("json-malformed", str(exc)) from exc
    # The parser accepts unsorted keys, spaces and escapes. Only this comparison finds them.
    if expected != raw:
        raise PackageError("json-not-canonical", "expected sorted keys, no spaces and no escapes")
    return value


def finite_number(text: str) -> float:
    """Parse a float of untrusted JSON. Pass this to `json.loads` as `parse_float` and `parse_constant`.

    By default, `json.loads` accepts NaN and infinity.

    Raises:
        ValueError: the number is NaN, infinite or too large.
    """
    # 1e999 is valid JSON, and becomes infinity here.
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"expected finite numbers, got {text:.40}")
    return number


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"{len(pairs) - len(found)} repeated keys in one object")
    return found


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"expected an integer, got {text[:40]}")


def _check(value: JSON, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"expected nesting of at most {MAX_DEPTH}")
    # bool comes before int, because it is a subclass.
    if value is None or isinstance(value, str | bool):
        return
    if isinstance(value, int):
        # Many languages cannot read integers of more than 64 bits.
        if not -_INT_LIMIT <= value < _INT_LIMIT:
            raise ValueError(f"expected a signed 64-bit integer, got one of {value.bit_length()} bits")
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                # `json.dumps` would turn 1 and "1" into the same key.
                raise TypeError(f"expected string keys, got {type(key).__name__}")
            _check(item, depth + 1)
        return
    if isinstance(value, list | tuple):
        for item in value:
            _check(item, depth + 1)
        return
    raise TypeError(f"expected null, boolean, integer, string, list or object, got {type(value).__name__}")
