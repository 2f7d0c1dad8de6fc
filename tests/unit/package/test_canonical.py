"""Tests of canonical JSON: each value has one byte string."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from permille.digests import JSON, MAX_DEPTH, canonical_json, parse_canonical
from permille.errors import PackageError

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_is_read_again(value: Any) -> None:
    assert parse_canonical(canonical_json(value), 1 << 20) == value


@given(st.dictionaries(st.text(), st.integers(0, 9), min_size=2, max_size=5))
def test_the_order_of_keys_does_not_matter(value: dict[str, int]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


def test_bytes_are_these() -> None:
    value: JSON = {"b": [1, -2, True, None], "a": {"é": "\u2028\n"}, "A": ""}
    assert canonical_json(value) == '{"A":"","a":{"é":"\u2028\\n"},"b":[1,-2,true,null]}'.encode()


@pytest.mark.parametrize("value", [0.5, {"a": float("nan")}, [b"bytes"], {1: 2}, {"a": {1, 2}}])
def test_what_json_does_not_hold_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        canonical_json(value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, "\ud800"])
def test_values_out_of_range_are_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        canonical_json(value)


def test_nesting_has_a_limit() -> None:
    def nested(depth: int) -> bytes:
        return b"[" * depth + b"]" * depth

    assert parse_canonical(nested(MAX_DEPTH), 1000) is not None
    with pytest.raises(PackageError, match="json-malformed"):
        parse_canonical(nested(MAX_DEPTH + 2), 1000)


@given(VALUES, st.sampled_from([{"indent": 1}, {"separators": (", ", ":")}]))
def test_other_spellings_are_refused(value: Any, style: dict[str, Any]) -> None:
    other = json.dumps(value, sort_keys=True, **style).encode()
    if other != canonical_json(value):
        with pytest.raises(PackageError, match="json-"):
            parse_canonical(other, 1 << 20)


def test_size_is_checked_before_anything_is_parsed() -> None:
    with pytest.raises(PackageError, match="json-size: expected at most 3 bytes, got 4"):
        parse_canonical(b"null", 3)
