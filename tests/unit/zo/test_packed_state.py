"""Tests of the packed state: one byte string, readable by the reference, with the state digest of its log."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from permille.errors import InputError, PackageError
from permille.zo.lattice import STATE_LIMIT, state_digest
from permille.zo.packed_state import StateHeader, StateOrigin, decode_state, encode_state
from permille.zo.replay import replay
from tests.unit.zo import reference
from tests.unit.zo.logs import fields_of, make_header, random_rows

LIMIT = 1 << 20


def state_header(**changes: Any) -> StateHeader:
    fields: dict[str, Any] = {
        "package_digest": "sha256:" + "a" * 64,
        "mask_digest": "sha256:" + "b" * 64,
        "step_unit_exponent": -20,
        "k": 147,
        "origin": StateOrigin.PERSONAL,
    }
    return StateHeader(**fields | changes)


def test_a_state_has_the_bytes_that_the_format_states() -> None:
    data = encode_state(state_header(k=3), np.array([0, -1, 2]))
    header = (
        b'{"format":"permille-state","k":3,"mask_digest":"sha256:' + b"b" * 64 + b'","origin":"personal",'
        b'"package_digest":"sha256:' + b"a" * 64 + b'","step_unit_exponent":-20,"version":1}'
    )
    # 0, 1, 4 with three bits each: 000 100 001, filled from the lowest bit.
    assert data[:-32] == b"PMLSTA1\n" + len(header).to_bytes(4, "little") + header + b"\x03\x08\x01"


@settings(max_examples=60, deadline=None)
@given(
    s_K=arrays.arrays(
        np.int64,
        st.integers(1, 300),
        elements=st.one_of(st.integers(-3, 3), st.integers(-STATE_LIMIT, STATE_LIMIT)),
    ),
    origin=st.sampled_from(StateOrigin),
    exponent=st.integers(-149, 64),
)
def test_any_state_comes_back_and_the_reference_reads_it(
    s_K: Any, origin: StateOrigin, exponent: int
) -> None:
    header = state_header(k=len(s_K), origin=origin, step_unit_exponent=exponent)
    data = encode_state(header, s_K)
    found = decode_state(data, max_bytes=len(data), max_k=len(s_K))
    assert found.header == header
    assert found.s_K.tolist() == s_K.tolist()
    fields, numbers = reference.read_state(data)
    assert (fields["origin"], fields["k"], numbers) == (origin.value, len(s_K), s_K.tolist())


@pytest.mark.parametrize("k", [4095, 4096, 4097, 8192])
def test_blocks_have_their_own_width(k: int) -> None:
    s_K = np.arange(k) % 7
    s_K[4096:] *= 100_000
    data = encode_state(state_header(k=k), s_K)
    assert decode_state(data, max_bytes=LIMIT, max_k=k).s_K.tolist() == s_K.tolist()
    assert reference.read_state(data)[1] == s_K.tolist()


def test_zeros_take_a_byte_a_block() -> None:
    one, many = (len(encode_state(state_header(k=k), np.zeros(k, np.int64))) for k in (4096, 40_960))
    assert many - one == 9 + 1  # nine blocks, and one more digit of k


def test_log_and_packed_state_of_a_run_have_one_digest() -> None:
    header, rows = make_header(), random_rows(40)
    s_K = replay(header, np.array(rows))
    data = encode_state(state_header(k=header.k), s_K)
    found = decode_state(data, max_bytes=LIMIT, max_k=header.k)
    found.check_binding(package_digest=header.package_digest, mask_digest=header.mask_digest, k=header.k)
    name = state_digest(
        found.s_K, mask_digest=found.header.mask_digest, step_unit_exponent=found.header.step_unit_exponent
    )
    fields, numbers = reference.read_state(data)
    assert name == reference.state_digest(fields_of(header), reference.state(fields_of(header), rows))
    assert name == reference.state_digest(fields, numbers)


@pytest.mark.parametrize(
    "changes",
    [
        *({"package_digest": "sha256:abc"}, {"mask_digest": ""}),
        *({"k": bad} for bad in (0, 2**32 + 1, True)),
        *({"step_unit_exponent": bad} for bad in (-150, 1.0)),
    ],
)
def test_headers_beyond_the_format_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"expected|must be"):
        state_header(**changes)


@pytest.mark.parametrize("s_K", [np.zeros(146, np.int64), np.zeros(147, np.int32), np.full(147, 2**53 + 1)])
def test_what_is_no_state_is_not_encoded(s_K: Any) -> None:
    with pytest.raises(InputError, match="expected a state"):
        encode_state(state_header(), s_K)


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 10**6), flip=st.integers(1, 255), cut=st.integers(0, 400))
def test_a_changed_or_cut_state_is_refused(place: int, flip: int, cut: int) -> None:
    data = bytearray(encode_state(state_header(), np.arange(147) - 70))
    data[place % len(data)] ^= flip
    for bad in (bytes(data), bytes(data)[: -cut - 1], b"", bytes(data) + b"\0"):
        with pytest.raises(PackageError, match="state-corrupt"):
            decode_state(bad, max_bytes=LIMIT, max_k=147)
