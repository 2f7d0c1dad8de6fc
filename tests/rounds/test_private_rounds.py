"""Tests of private rounds: they publish only the sum of bounded vectors and noise."""

import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permille.errors import InputError, PackageError
from permille_rounds.contribution import Contribution
from permille_rounds.definition import MAX_DEVICES, Definition, Rule
from permille_rounds.masked import (
    decode_answer,
    decode_opening,
    encode_answer,
    opening_of,
    vector_size,
)
from permille_rounds.privacy.rules import LARGEST_DEVIATION, LARGEST_KEEPER_CLIP, PrivacyMode
from permille_rounds.privacy.seals import mask_of, open_seed, seal_context
from permille_rounds.private_rounds import (
    draw_round_noise,
    noised_sum,
    round_of_sum,
    unmasked_sum,
    vector_of,
)
from permille_rounds.rounds import History, combine
from tests.rounds.federations import make_contributions, make_definition
from tests.rounds.private import KEEPER_KEY, make_masked, make_private, norm_squared

PRIVATE = make_private()
KEPT = make_private(mode=PrivacyMode.KEEPER)


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.integers(-8192, 8192), min_size=4, max_size=12).filter(lambda v: len(v) % 4 == 0),
    clip=st.integers(10, 60_000),
    share=st.floats(-1, 1),
)
def test_a_devices_vector_is_within_the_clip_whatever_it_holds(
    values: list[int], clip: int, share: float
) -> None:
    rules = make_private(clip=clip)
    gain = int(share * rules.gain_bound)
    vector_V = vector_of(
        Contribution(
            definition=rules,
            round_number=0,
            weight=1,
            start_digest=rules.digest,
            c_TQ=np.array(values, dtype=np.int64).reshape(-1, 4),
            gain=gain,
        )
    )
    assert norm_squared(vector_V) <= clip * clip
    assert len(vector_V) == 13
    assert vector_V[-1] == gain
    assert not vector_V[len(values) : -1].any()
    if sum(c * c for c in values) <= math.isqrt(98 * clip * clip // 100) ** 2:
        assert vector_V[: len(values)].tolist() == values


def test_a_round_is_the_mean_of_vectors_and_noise() -> None:
    history = History.begin(PRIVATE)
    contributions = make_contributions(history, 7)
    noise_V = draw_round_noise(PRIVATE, random.Random(3).randrange)
    sum_V = noised_sum(PRIVATE, 0, contributions, noise_V)
    made = round_of_sum(PRIVATE, 0, 7, sum_V)
    history.apply([made])
    expected = sum(vector_of(each).astype(object) for each in contributions) + noise_V
    assert noise_V.std() > 1000
    assert sum_V.tolist() == list(expected)
    assert made.weight_K.tolist() == [7, 7, 7]  # although every third device took two steps only
    assert made.u_KJ.reshape(-1).tolist() == [round(4 * int(a) / 7) for a in expected[:-1]]
    assert history.s_W.any()


def test_no_sum_of_a_private_federation_is_made_without_noise() -> None:
    with pytest.raises(InputError, match="need noise"):
        combine(PRIVATE, 0, make_contributions(History.begin(PRIVATE), 3))
    assert not combine(PRIVATE, 0, []).u_KJ.any()


def keeper_answers(data: bytes, noise_V: np.ndarray) -> bytes:
    """Return a keeper's answer, without its memory of earlier rounds."""
    opening = decode_opening(data)
    total_V = np.zeros(vector_size(opening.definition), dtype=np.uint32)
    for key, seal, _ in opening.entries:
        context = seal_context(opening.definition.digest, opening.round_number, key)
        total_V += mask_of(open_seed(seal, KEEPER_KEY, context), len(total_V))
    return encode_answer(opening, total_V - noise_V.astype(np.uint32))


def test_masked_sums_equal_plain_sums_whoever_drops_out() -> None:
    history = History.begin(KEPT)
    contributions = make_contributions(history, 50)
    masked, size = make_masked(history, contributions)
    assert size == 8 + 32 + 4 + 32 + 80 + 64 + 4 * vector_size(KEPT) + 64
    rng = np.random.default_rng(5)
    for _ in range(5):
        came = sorted(rng.choice(50, 35, replace=False).tolist())
        noise_V = draw_round_noise(KEPT)
        opening = opening_of(KEPT, 0, [masked[index] for index in came])
        answer_V = decode_answer(keeper_answers(opening.to_bytes(), noise_V), opening)
        unmasked_V = unmasked_sum(KEPT, 0, [masked[index] for index in came], answer_V)
        plain_V = noised_sum(KEPT, 0, [contributions[index] for index in came], noise_V)
        assert unmasked_V.tolist() == plain_V.tolist()


def test_a_masked_vector_says_nothing_without_the_keeper() -> None:
    history = History.begin(KEPT)
    one = make_contributions(history, 1)
    seen = np.concatenate([make_masked(history, one)[0][0].masked_V for _ in range(400)])
    counts = np.bincount(seen >> 29, minlength=8)
    assert len(seen) == 400 * 13
    # Chi-square with 7 degrees of freedom.
    assert ((counts - len(seen) / 8) ** 2 / (len(seen) / 8)).sum() < 40


def test_definitions_with_privacy_come_back_from_their_bytes() -> None:
    for definition in (PRIVATE, KEPT):
        assert Definition.from_bytes(definition.to_bytes()) == definition
    assert json.loads(KEPT.to_bytes())["privacy"]["keeper"]["url"] == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": None},
        {"clip": 1 << 25},
        {"clip": 163_840, "mode": PrivacyMode.KEEPER},
        {"max_weight": 2},
        {"rule": Rule.TRIMMED, "trim_percent": 10},
        {"privacy": {"noise_hundredths": 0}},
        {"privacy": {"participations": 11}},
        {"privacy": {"delta_exponent": 2}},
    ],
)
def test_privacy_that_cannot_hold_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"must be|Privacy needs"):
        make_private(**changes)


def test_the_gains_of_the_most_devices_and_the_noise_fit_into_32_bits() -> None:
    definition = make_private(clip=LARGEST_KEEPER_CLIP, mode=PrivacyMode.KEEPER)
    assert MAX_DEVICES * definition.gain_bound + 16 * LARGEST_DEVIATION < 1 << 31


def test_a_keeper_sums_no_few() -> None:
    with pytest.raises(InputError, match="minimum"):
        make_private(mode=PrivacyMode.KEEPER, minimum=31)
    history = History.begin(KEPT)
    masked, _ = make_masked(history, make_contributions(history, 31))
    with pytest.raises(PackageError, match=r"^round-limit"):
        decode_opening(opening_of(KEPT, 0, masked).to_bytes())


def test_private_and_open_federations_have_different_names() -> None:
    assert make_definition(clip=1000).digest != PRIVATE.digest
