"""Malformed definitions, contributions, segments and heads: at least one for each code of FORMAT 13."""

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from permille.errors import PackageError
from permille_rounds.catch_up import PooledCheckpoint, caught_up, encode_catch_up, pack_state
from permille_rounds.contribution import decode_contribution, encode_contribution
from permille_rounds.definition import Definition
from permille_rounds.rounds import History, combine, decode_segment
from tests.rounds.federations import KEY, make_contributions, make_definition
from tests.unit.zo.logs import flipped

pytestmark = pytest.mark.attack(13, "malformed rounds")

DEFINITION = make_definition()
HISTORY = History.begin(DEFINITION)
SENT = make_contributions(HISTORY, 3)
GOOD = encode_contribution(SENT[0], KEY)
ROUND = combine(DEFINITION, 0, SENT)
STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def definition(**changes: Any) -> Callable[[], object]:
    fields = json.loads(DEFINITION.to_bytes()) | changes
    data = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return lambda: Definition.from_bytes(data)


def with_gain(varint: bytes) -> bytes:
    """Return a contribution with another gain at its end and the correct size."""
    size = struct.unpack_from("<I", GOOD, 83)[0] - 1 + len(varint)
    return GOOD[:83] + struct.pack("<I", size) + GOOD[87:-65] + varint + GOOD[-64:]


def contribution(
    data: bytes = GOOD, key: Ed25519PrivateKey | None = KEY, rules: Definition = DEFINITION
) -> Callable[[], object]:
    """Return a call that decodes these bytes, signed again with `key` unless it is None."""
    sealed = data if key is None else data[:-64] + key.sign(data[:-64])
    return lambda: decode_contribution(sealed, rules, KEY.public_key())


def sent_with(offset: int, form: str, number: int) -> Callable[[], object]:
    """Return a call that decodes a contribution with another number at an offset of its head."""
    size = struct.calcsize("<" + form)
    return contribution(GOOD[:offset] + struct.pack("<" + form, number) + GOOD[offset + size :])


def payload(numbers: bytes, number: int = 0) -> Callable[[], object]:
    """Return a call that decodes a segment of one round with this payload."""
    data = struct.pack("<II", number, len(numbers)) + numbers
    return segment(data)


def segment(data: bytes, max_bytes: int = 10_000) -> Callable[[], object]:
    return lambda: decode_segment(data, DEFINITION, max_bytes=max_bytes)


def applied(number: int) -> Callable[[], object]:
    one = combine(DEFINITION, number, [])
    return lambda: History.begin(DEFINITION).apply([one])


def head(change: Callable[[bytes], bytes], key: Ed25519PrivateKey = KEY) -> Callable[[], object]:
    data = HISTORY.head.signed(KEY)
    changed = change(data[:-64])
    return lambda: HISTORY.check_head(changed + key.sign(changed))


def out_of_range() -> object:
    history = History.begin(DEFINITION)
    history.reach = 2**53
    history.apply([ROUND])
    return None


def too_fast() -> object:
    fast = make_definition(rate_shift=8, guard_bits=8, steps=1)
    far = make_contributions(History.begin(fast), 1, size=2000)
    far[0].c_TQ[...] = 8192
    moved = [combine(fast, 0, far)]
    history = History.begin(fast)
    history.reach = 2**53 - 1
    history.apply(moved)
    return None


def catch_up(
    change: Callable[[bytes], bytes] = lambda data: data, held: History | None = None, until: int = 2
) -> Callable[[], object]:
    """Return a call that gives a changed answer to the holder of a history."""
    data = change(CATCH_UP if until == 2 else encode_catch_up(None, [], HISTORY.head.signed(KEY)))
    return lambda: caught_up(held or HISTORY, data, max_bytes=10_000)


def moved(rounds: int, seed: int = 0) -> History:
    history = History.begin(DEFINITION)
    for number in range(rounds):
        history.apply([combine(DEFINITION, number, make_contributions(history, 3, seed=seed + number))])
    return history


def checkpoint(state: bytes) -> Callable[[bytes], bytes]:
    """Return a change that replaces the answer by one with this checkpoint."""
    kept = PooledCheckpoint(state=state, head=MOVED.head.signed(KEY))
    return lambda _: encode_catch_up(kept, [], MOVED.head.signed(KEY))


MOVED = moved(2)
CATCH_UP = encode_catch_up(
    PooledCheckpoint(state=pack_state(DEFINITION, MOVED.s_W), head=MOVED.head.signed(KEY)),
    [],
    MOVED.head.signed(KEY),
)
OTHER_PACKAGE = make_definition(log={"package_digest": "sha256:" + "7" * 64})
NINE = b"\x09" * 15  # 3 weights and 12 coefficients
NAMED: list[tuple[str, str, Callable[[], object]]] = [
    ("round-definition", "no_json", lambda: Definition.from_bytes(b"{")),
    ("round-definition", "two_megabytes", lambda: Definition.from_bytes(bytes(2 << 20))),
    ("round-definition", "nested_deep", lambda: Definition.from_bytes(b"[" * 9999)),
    ("round-definition", "spaces", lambda: Definition.from_bytes(DEFINITION.to_bytes() + b" ")),
    ("round-definition", "unknown_key", definition(name="Ada")),
    ("round-definition", "another_version", definition(version=2)),
    ("round-definition", "a_rule_that_nobody_knows", definition(rule="best")),
    ("round-definition", "a_real_number_of_rows", definition(batch_rows=1.0)),
    ("round-definition", "true_rows", definition(batch_rows=True)),
    ("round-definition", "steps_that_do_not_divide", definition(steps=4)),
    ("round-definition", "a_log_that_is_a_list", definition(log=[])),
    ("round-definition", "a_key_of_31_bytes", definition(round_key="A" * 42)),
    ("round-definition", "a_key_with_loose_bits", definition(round_key=DEFINITION.round_key[:-1] + "B")),
    ("round-definition", "a_key_that_is_a_number", definition(round_key=7)),
    ("round-definition", "a_clip_that_leaves_no_gain", definition(clip=9)),
    ("round-content", "no_bytes", contribution(b"", None)),
    ("round-content", "cut", contribution(GOOD[:-1], None)),
    ("round-content", "bytes_behind_the_signature", contribution(GOOD + b"\0", None)),
    ("round-content", "another_magic", contribution(b"PMLCTB2\n" + GOOD[8:])),
    ("round-content", "round_beyond_the_last", sent_with(40, "I", 10)),
    ("round-content", "no_weight", sent_with(44, "B", 0)),
    ("round-content", "weight_of_two_where_all_are_equal", sent_with(44, "B", 2)),
    ("round-content", "no_steps", sent_with(45, "H", 0)),
    ("round-content", "one_step_more_than_there_are_integers", sent_with(45, "H", 65535)),
    ("round-content", "an_integer_beyond_8192", contribution(GOOD[:83] + b"\x82\x80\x01" + GOOD[86:])),
    ("round-content", "an_overlong_integer", contribution(GOOD[:83] + b"\x80\x00" + GOOD[85:])),
    ("round-content", "a_gain_beyond_the_bound", contribution(with_gain(b"\x82\x10"))),
    ("round-binding", "contribution_to_another_federation", contribution(rules=make_definition(clip=19))),
    ("round-signature", "one_flipped_bit", contribution(flipped(GOOD, 90), None)),
    ("round-signature", "signed_by_a_stranger", contribution(key=STRANGER)),
    ("round-limit", "segment_of_more_bytes_than_accepted", segment(ROUND.to_bytes(), 10)),
    ("round-content", "segment_with_bytes_behind", segment(ROUND.to_bytes() + b"\0")),
    ("round-content", "round_of_four_gigabytes", segment(struct.pack("<II", 0, 2**32 - 1) + NINE)),
    ("round-content", "round_with_an_integer_too_few", payload(NINE[:-1])),
    ("round-content", "round_with_a_cut_integer", payload(NINE[:-1] + b"\x89")),
    ("round-content", "round_with_two_integers_in_one", payload(NINE[:-2] + b"\x89\x01")),
    ("round-content", "weights_that_rise", payload(b"\x01\x02\x02" + NINE[3:])),
    ("round-content", "moved_by_nobody", payload(b"\x02\x02\x00" + NINE[3:])),
    ("round-content", "more_devices_than_there_can_be", payload(b"\x81\x80\x40" * 3 + NINE[3:])),
    ("round-content", "coefficient_beyond_the_logs", payload(NINE[:-1] + b"\xff\xff\xff\xff\x7f")),
    ("round-content", "a_round_left_out", applied(1)),
    ("round-limit", "sum_beyond_the_exact_range", out_of_range),
    ("round-limit", "steps_that_leave_the_exact_range", too_fast),
    ("round-content", "head_of_no_bytes", lambda: HISTORY.check_head(b"")),
    ("round-content", "head_with_another_magic", head(lambda data: b"PMLHED2\n" + data[8:])),
    ("round-signature", "head_signed_by_a_stranger", head(lambda data: data, STRANGER)),
    ("round-chain", "head_of_a_later_round", head(lambda data: data[:40] + b"\x01" + data[41:])),
    ("round-chain", "head_of_another_federation", head(lambda data: data[:8] + bytes(32) + data[40:])),
    ("round-limit", "catch_up_of_more_bytes_than_accepted", catch_up(lambda data: data + bytes(20_000))),
    ("round-content", "catch_up_of_no_bytes", catch_up(lambda _: b"")),
    ("round-content", "catch_up_with_another_magic", catch_up(lambda data: b"PMLCUP2\n" + data[8:])),
    ("round-content", "catch_up_cut_in_its_state", catch_up(lambda data: data[:100])),
    (
        "round-content",
        "catch_up_of_a_state_of_four_gigabytes",
        catch_up(lambda d: d[:8] + b"\xff" * 4 + d[12:]),
    ),
    ("round-content", "catch_up_without_a_head", catch_up(lambda data: data[:-180])),
    ("round-content", "catch_up_with_bytes_behind", catch_up(lambda data: data + b"\0")),
    ("round-signature", "catch_up_with_a_changed_head", catch_up(lambda data: flipped(data, len(data) - 1))),
    ("state-corrupt", "catch_up_with_a_flipped_state", catch_up(lambda data: flipped(data, 90))),
    (
        "round-chain",
        "checkpoint_that_its_head_does_not_name",
        catch_up(checkpoint(pack_state(DEFINITION, MOVED.s_W + 1))),
    ),
    (
        "state-binding",
        "checkpoint_of_another_package",
        catch_up(checkpoint(pack_state(OTHER_PACKAGE, MOVED.s_W))),
    ),
    ("round-chain", "catch_up_to_an_older_round", catch_up(held=MOVED, until=0)),
    ("round-chain", "catch_up_to_what_is_held_by_another_way", catch_up(held=moved(2, seed=9))),
    ("round-chain", "head_of_another_history", head(lambda data: flipped(data, 60))),
]
ATTACKS = [(code, data) for code, _, data in NAMED]


@pytest.mark.parametrize(("code", "attack"), ATTACKS, ids=[f"{c}-{name}" for c, name, _ in NAMED])
def test_malformed_rounds_are_refused(code: str, attack: Callable[[], object]) -> None:
    with pytest.raises(PackageError, match=f"^{code}:"):
        attack()


def test_honest_bytes_are_read() -> None:
    contribution()()
    assert caught_up(HISTORY, CATCH_UP, max_bytes=10_000).chain == MOVED.chain
    assert not HISTORY.s_W.any()
    assert decode_segment(ROUND.to_bytes(), DEFINITION, max_bytes=1000)[0].to_bytes() == ROUND.to_bytes()
    HISTORY.check_head(HISTORY.head.signed(KEY))
