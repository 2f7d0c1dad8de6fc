"""Malformed privacy rules, masked contributions and questions to a keeper (FORMAT 13.6, 13.7)."""

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from permille.errors import PackageError
from permille_rounds.definition import Definition
from permille_rounds.masked import (
    decode_answer,
    decode_masked,
    decode_opening,
    decode_refusal,
    encode_masked,
    encode_refusal,
    opening_of,
)
from permille_rounds.privacy.rules import PrivacyMode
from permille_rounds.privacy.seals import open_seed, seal_context
from permille_rounds.private_rounds import vector_of
from permille_rounds.rounds import History
from tests.rounds.federations import KEY, make_contributions
from tests.rounds.private import KEEPER, KEEPER_KEY, device_key, make_masked, make_private
from tests.unit.zo.logs import flipped

pytestmark = pytest.mark.attack(13, "malformed rounds")

RULES = make_private(mode=PrivacyMode.KEEPER)
WEAKER = make_private(mode=PrivacyMode.KEEPER, privacy={"noise_hundredths": 1})
HISTORY = History.begin(RULES)
SENT = make_contributions(HISTORY, 40)
GOOD = encode_masked(RULES, 0, HISTORY.digest, vector_of(SENT[0]), KEY)
MASKED, _ = make_masked(HISTORY, SENT)
ASKED = opening_of(RULES, 0, MASKED).to_bytes()
# Sizes in a question: of all before the entries, and of an entry (key, seal, signature).
HEAD = 16 + len(RULES.to_bytes())
ENTRY = 32 + 80 + 64
ANSWER = b"PMLSUM1\n" + bytes(32 + 4 * 13)


def privacy(**changes: Any) -> Callable[[], object]:
    fields = json.loads(RULES.to_bytes())
    fields["privacy"] |= changes
    data = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return lambda: Definition.from_bytes(data)


def keeper(**changes: Any) -> Callable[[], object]:
    return privacy(keeper=json.loads(RULES.to_bytes())["privacy"]["keeper"] | changes)


def masked(data: bytes, *, sign: bool = False, rules: Definition = RULES) -> Callable[[], object]:
    sealed = data[:-64] + KEY.sign(data[:-64]) if sign else data
    return lambda: decode_masked(sealed, rules, KEY.public_key())


def asked(data: bytes) -> Callable[[], object]:
    return lambda: decode_opening(data)


def swapped() -> bytes:
    """Return the question with its first two devices exchanged."""
    return (
        ASKED[:HEAD]
        + ASKED[HEAD + ENTRY : HEAD + 2 * ENTRY]
        + ASKED[HEAD : HEAD + ENTRY]
        + ASKED[HEAD + 2 * ENTRY :]
    )


def opened(context: bytes, key: X25519PrivateKey = KEEPER_KEY) -> Callable[[], object]:
    return lambda: open_seed(MASKED[0].seal, key, context)


def context(rules: Definition = RULES, number: int = 0, device: int = 0) -> bytes:
    return seal_context(rules.digest, number, device_key(device).public_key().public_bytes_raw())


def refused(keys: bytes, question: bytes = ASKED) -> Callable[[], object]:
    return lambda: decode_refusal(encode_refusal(question, [keys]), opening_of(RULES, 0, MASKED))


NAMED: list[tuple[str, str, Callable[[], object]]] = [
    ("round-definition", "privacy_that_is_text", privacy(mode="keeper", keeper="here")),
    ("round-definition", "a_mode_that_nobody_knows", privacy(mode="none")),
    ("round-definition", "a_keeper_where_the_service_adds_noise", privacy(mode="central")),
    ("round-definition", "no_keeper", privacy(keeper=None)),
    ("round-definition", "an_unknown_key", privacy(clip=3)),
    ("round-definition", "real_noise", privacy(noise_hundredths=4.0)),
    ("round-definition", "no_noise", privacy(noise_hundredths=0)),
    ("round-definition", "a_keeper_without_tls", keeper(url="http://keeper.example.org")),
    ("round-definition", "a_keeper_that_is_a_file", keeper(url="file:///etc/passwd")),
    ("round-definition", "a_keeper_that_is_a_number", keeper(url=5)),
    ("round-definition", "a_keepers_key_of_a_byte", keeper(key="AA")),
    ("round-definition", "a_keepers_key_with_padding", keeper(key=KEEPER.key + "=")),
    ("round-content", "nothing", masked(b"")),
    ("round-content", "an_integer_too_many", masked(GOOD[:-64] + bytes(4) + GOOD[-64:], sign=True)),
    ("round-content", "an_open_contribution", masked(b"PMLCTB1\n" + GOOD[8:], sign=True)),
    (
        "round-content",
        "a_round_beyond_the_last",
        masked(GOOD[:40] + struct.pack("<I", 10) + GOOD[44:], sign=True),
    ),
    ("round-binding", "of_another_federation", masked(GOOD[:8] + bytes(32) + GOOD[40:], sign=True)),
    ("round-signature", "one_flipped_bit", masked(flipped(GOOD, len(GOOD) - 70))),
    ("round-signature", "a_seal_that_was_put_in", masked(flipped(GOOD, 80), sign=True)),
    (
        "round-signature",
        "a_seal_of_another_round",
        masked(GOOD[:40] + struct.pack("<I", 1) + GOOD[44:], sign=True),
    ),
    ("round-content", "a_question_of_no_bytes", asked(b"")),
    ("round-content", "a_question_with_bytes_behind", asked(ASKED + b"\0")),
    ("round-content", "a_definition_of_four_gigabytes", asked(ASKED[:12] + b"\xff" * 4 + ASKED[16:])),
    ("round-definition", "a_definition_that_is_none", asked(flipped(ASKED, 20))),
    ("round-content", "devices_out_of_order", asked(swapped())),
    ("round-content", "a_device_twice", asked(ASKED[:HEAD] + ASKED[HEAD : HEAD + ENTRY] + ASKED[HEAD:])),
    ("round-limit", "too_few_devices", asked(ASKED[: HEAD + 31 * ENTRY])),
    ("round-signature", "a_seal_by_the_service", asked(flipped(ASKED, HEAD + 40))),
    ("round-signature", "seals_of_another_round", asked(ASKED[:8] + struct.pack("<I", 1) + ASKED[12:])),
    ("round-content", "the_round_beyond_the_last", asked(ASKED[:8] + struct.pack("<I", 10) + ASKED[12:])),
    ("round-seal", "opened_for_another_round", opened(context(number=1))),
    ("round-seal", "opened_for_another_device", opened(context(device=1))),
    ("round-seal", "opened_under_weaker_noise", opened(context(WEAKER))),
    ("round-seal", "opened_by_a_stranger", opened(context(), X25519PrivateKey.generate())),
    (
        "round-content",
        "an_answer_to_another_question",
        lambda: decode_answer(ANSWER, opening_of(RULES, 0, MASKED)),
    ),
    ("round-content", "a_refusal_that_names_nobody", refused(b"")),
    ("round-content", "a_refusal_of_a_stranger", refused(bytes(32))),
    ("round-content", "a_refusal_with_half_a_key", refused(ASKED[HEAD : HEAD + 16])),
    ("round-content", "a_refusal_of_a_device_twice", refused(2 * ASKED[HEAD : HEAD + 32])),
    ("round-content", "a_refusal_of_another_question", refused(ASKED[HEAD : HEAD + 32], ASKED[1:])),
]
ATTACKS = [(code, attack) for code, _, attack in NAMED]


@pytest.mark.parametrize(("code", "attack"), ATTACKS, ids=[f"{c}-{n}" for c, n, _ in NAMED])
def test_malformed_privacy_is_refused(code: str, attack: Callable[[], object]) -> None:
    with pytest.raises(PackageError, match=f"^{code}:"):
        attack()


def test_honest_bytes_are_read_and_open_once_more() -> None:
    masked(GOOD)()
    assert decode_opening(ASKED).to_bytes() == ASKED
    assert len(open_seed(MASKED[0].seal, KEEPER_KEY, context())) == 32
