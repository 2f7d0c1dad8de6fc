"""Tests of rounds: exact sums in any order, which anybody can compute from the public bytes."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permille.choices import EstimatorKind
from permille.digests import digest_of
from permille.errors import InputError, PackageError
from permille.zo.header import DirectionKind
from permille.zo.packed_state import StateHeader, StateOrigin, decode_state, encode_state
from permille_rounds.contribution import Contribution, decode_contribution, encode_contribution
from permille_rounds.definition import Definition, Rule
from permille_rounds.rounds import History, clipped, combine, decode_segment
from tests.rounds.federations import KEY, make_contributions, make_definition, split_log
from tests.unit.zo import reference

GRADIENT = {"estimator": EstimatorKind.GRADIENT, "directions": DirectionKind.GROUPS}
DEFINITIONS = {
    "shared": make_definition(),
    "weights": make_definition(max_weight=5),
    "split": make_definition(log=split_log()),
    "clipped": make_definition(clip=500, guard_bits=0),
    "slow": make_definition(rate_shift=-4, guard_bits=1),
    "fast": make_definition(rate_shift=3),
    "trimmed": make_definition(rule=Rule.TRIMMED, trim_percent=20),
    "median": make_definition(rule=Rule.TRIMMED, trim_percent=50),
    "groups": make_definition(log=GRADIENT),
}


def run(definition: Definition, rounds: int = 4, devices: int = 7) -> tuple[History, bytes]:
    """Run a federation of some rounds, of which the second is void. Return its history and its segment."""
    history = History.begin(definition)
    made = []
    for number in range(rounds):
        contributions = [] if number == 1 else make_contributions(history, devices, seed=number)
        made.append(combine(definition, number, contributions))
        history.apply(made[-1:])
    return history, b"".join(each.to_bytes() for each in made)


@pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=DEFINITIONS)
def test_a_stranger_with_the_public_bytes_gets_the_same_state_and_chain(definition: Definition) -> None:
    history, segment = run(definition)
    chain, s = reference.audit(definition.to_bytes(), segment)
    assert history.s_W.any()
    assert history.s_W.tolist() == s
    assert history.chain == chain


@pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=DEFINITIONS)
def test_a_round_is_what_the_text_says(definition: Definition) -> None:
    history = History.begin(definition)
    contributions = make_contributions(history, 7)
    devices = [{"weight": c.weight, "rows": c.c_TQ.tolist()} for c in contributions]
    expected = reference.round_bytes(json.loads(definition.to_bytes()), 0, devices)
    assert combine(definition, 0, contributions).to_bytes() == expected


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(9)), name=st.sampled_from(sorted(DEFINITIONS)))
def test_the_order_of_the_devices_does_not_matter(order: list[int], name: str) -> None:
    contributions = make_contributions(History.begin(DEFINITIONS[name]), 9)
    shuffled = [contributions[index] for index in order]
    left, right = (combine(DEFINITIONS[name], 0, each) for each in (contributions, shuffled))
    assert left.to_bytes() == right.to_bytes()


def test_the_bytes_of_a_known_federation_stay() -> None:
    definition = make_definition(queries=2, max_weight=2, clip=600)
    history = History.begin(definition)
    devices = [
        Contribution(
            definition=definition,
            round_number=0,
            weight=1 + device % 2,
            start_digest=history.digest,
            c_TQ=(np.arange(6, dtype=np.int64).reshape(3, 2) * 37 - 11 * device)[: 3 - device // 2],
        )
        for device in range(3)
    ]
    history.apply([combine(definition, 0, devices), combine(definition, 1, [])])
    assert history.chain == "sha256:6ef457bfcca2282aa286ee0c9227287f12b11ae81196b82a21f30ed3bba4cfb3"
    assert history.digest == "sha256:07b5303478786dfd883eca00db31ebbffc4ee08f23951728412682e1f640e5fa"


def test_the_pooled_state_is_the_mean_of_the_devices_models() -> None:
    definition = make_definition()
    history = History.begin(definition)
    contributions = [c for c in make_contributions(history, 8) if len(c.c_TQ) == definition.steps]
    history.apply([combine(definition, 0, contributions)])
    header = json.loads(definition.log.to_bytes())
    models = np.array([reference.state(header, c.c_TQ.tolist()) for c in contributions])
    away_W = np.abs(history.s_W - (models * 2**definition.guard_bits).mean(axis=0))
    # Half a unit for each of the 3 * 4 coefficients.
    assert away_W.max() <= 6


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(-8192, 8192), min_size=1, max_size=40), clip=st.integers(1, 20_000))
def test_a_clipped_vector_is_within_the_norm_exactly_and_keeps_its_direction(
    values: list[int], clip: int
) -> None:
    c_TQ = np.array([values], dtype=np.int64)
    short_TQ = clipped(c_TQ, clip)
    assert sum(c * c for c in short_TQ[0].tolist()) <= clip * clip
    assert (short_TQ * c_TQ >= 0).all()
    if sum(c * c for c in values) <= clip * clip:
        assert (short_TQ == c_TQ).all()


def test_the_median_ignores_fewer_than_half_liars() -> None:
    definition = DEFINITIONS["median"]
    honest = make_contributions(History.begin(definition), 9, size=10)
    full = [c for c in honest if len(c.c_TQ) == definition.steps]
    liars = [
        Contribution(
            definition=definition,
            round_number=0,
            weight=1,
            start_digest=full[0].start_digest,
            c_TQ=np.full((3, 4), 8192),
        )
        for _ in range(len(full) - 1)
    ]
    highest = max(int(c.c_TQ.max()) for c in full)
    assert combine(definition, 0, full + liars).u_KJ.max() <= highest << definition.guard_bits


def test_a_returning_device_catches_up_by_segment_or_checkpoint() -> None:
    definition = DEFINITIONS["weights"]
    history, segment = run(definition, rounds=5)
    rounds = decode_segment(segment, definition, max_bytes=len(segment))
    by_segment = History.begin(definition)
    by_segment.apply(rounds)
    by_segment.check_head(history.head.signed(KEY))
    early = History.begin(definition)
    early.apply(rounds[:3])
    log = definition.log
    header = StateHeader(
        package_digest=log.package_digest,
        mask_digest=log.mask_digest,
        step_unit_exponent=log.step_unit_exponent,
        k=log.k,
        origin=StateOrigin.POOLED,
    )
    checkpoint = decode_state(encode_state(header, early.s_W), max_bytes=10_000, max_k=log.k)
    resumed = History.resume(definition, checkpoint.s_K, early.head.signed(KEY))
    resumed.apply(rounds[3:])
    resumed.check_head(history.head.signed(KEY))
    assert (resumed.s_W == history.s_W).all()
    assert resumed.reach == history.reach


def test_contributions_and_definitions_come_back_from_their_bytes() -> None:
    for definition in DEFINITIONS.values():
        assert Definition.from_bytes(definition.to_bytes()) == definition
        for sent in make_contributions(History.begin(definition), 3):
            data = encode_contribution(sent, KEY)
            read = decode_contribution(data, definition, KEY.public_key())
            assert (read.weight, read.start_digest) == (sent.weight, sent.start_digest)
            assert (read.c_TQ == sent.c_TQ).all()
            assert read.gain == sent.gain
            assert encode_contribution(read, KEY) == data


def test_a_round_that_is_refused_changes_nothing() -> None:
    definition = make_definition(rate_shift=8, guard_bits=8, log={"total_steps": 3 * 2**16})
    history = History.begin(definition)
    before = (history.chain, history.number, history.reach)
    large = combine(definition, 0, make_contributions(history, 1))
    history.reach = 2**53 - 1
    with pytest.raises(PackageError, match=r"^round-limit"):
        history.apply([large])
    assert (history.chain, history.number) == before[:2]
    assert not history.s_W.any()


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"steps": 4},
        {"steps": 1 << 16, "log": {"total_steps": 1 << 16}},
        {"guard_bits": 9},
        {"rate_shift": -9},
        {"clip": 9},
        {"max_weight": 17},
        {"minimum": 0},
        {"batch_rows": 0},
        {"row_tokens": 7},
        {"round_key": ""},
        {"trim_percent": 10},
        {"rule": Rule.TRIMMED},
        {"rule": Rule.TRIMMED, "trim_percent": 10, "max_weight": 2},
        {"log": {"basis_steps": 1, "estimator": "one_sided", "directions": "groups"}},
    ],
)
def test_definitions_that_cannot_work_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^expected|must be|Set max_weight"):
        make_definition(**changes)


def test_the_digest_of_a_definition_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job of a round, and a keeper, need it several times for each of up to 65,536 devices."""
    definition, to_bytes = make_definition(log={"seed": 4321}), Definition.to_bytes
    computed = 0

    def counted(self: Definition) -> bytes:
        nonlocal computed
        computed += 1
        return to_bytes(self)

    monkeypatch.setattr(Definition, "to_bytes", counted)
    assert definition.digest == digest_of(to_bytes(definition)) == definition.digest
    assert computed <= 1  # 0 if this process has run the test before


def test_contributions_that_do_not_belong_together_are_refused() -> None:
    history = History.begin(make_definition())
    good = make_contributions(history, 2)
    other = make_contributions(History.begin(make_definition(clip=19)), 1)
    history.apply([combine(history.definition, 0, good)])
    later = make_contributions(history, 1)
    for wrong in (other, later):
        with pytest.raises(InputError, match="A contribution belongs to round"):
            combine(history.definition, 0, good + wrong)
