"""Name values by their bytes: digests, and the canonical JSON whose digest is a value's name (FORMAT 1).

Canonical JSON has keys sorted by code point, no spaces, UTF-8 unescaped, integers within 64 bits, and no
floats: a number that is not an integer is written as a string by whoever defines the field.
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

MAX_DEPTH = 32
_INT_LIMIT = 2**63
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


def is_digest(text: object) -> bool:
    """Return whether `text` is a digest: "sha256:" and 64 lower-case hex digits."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def digest_of(data: bytes | memoryview) -> str:
    """The digest of these bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_bytes(digest: str) -> bytes:
    """The 32 bytes that a digest writes out."""
    return bytes.fromhex(digest.removeprefix("sha256:"))


def digest_of_file(path: Path) -> str:
    """The digest of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: JSON) -> bytes:
    """The only bytes that stand for `value`.

    Raises:
        TypeError: a float or anything else that JSON does not hold.
        ValueError: an integer outside of 64 bits, a lone surrogate, or nesting deeper than `MAX_DEPTH`.
    """
    _check(value, 0)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8")


def parse_canonical(data: bytes | memoryview, limit: int) -> JSON:
    """Parse bytes that `canonical_json` could have written, and no others.

    Args:
        data: at most `limit` bytes.

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
        raise PackageError(
            "json-malformed", f"expected JSON without floats and repeated keys: {exc}"
        ) from exc
    try:
        expected = canonical_json(value)
    except (TypeError, ValueError) as exc:
        raise PackageError("json-malformed", str(exc)) from exc
    if expected != raw:
        raise PackageError("json-not-canonical", "expected sorted keys, no spaces and no escapes")
    return value


def finite_number(text: str) -> float:
    """Read a float of foreign JSON: `parse_float` and `parse_constant` of `json.loads`, which takes NaN.

    Raises:
        ValueError: it is NaN, infinite or too large for a float.
    """
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
    if value is None or isinstance(value, str | bool):
        return
    if isinstance(value, int):
        if not -_INT_LIMIT <= value < _INT_LIMIT:
            raise ValueError(f"expected a signed 64-bit integer, got one of {value.bit_length()} bits")
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"expected string keys, got {type(key).__name__}")
            _check(item, depth + 1)
        return
    if isinstance(value, list | tuple):
        for item in value:
            _check(item, depth + 1)
        return
    raise TypeError(f"expected null, boolean, integer, string, list or object, got {type(value).__name__}")
