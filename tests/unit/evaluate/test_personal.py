"""Personal gain: what is compared to what, in which direction, and over whom."""

import math
from dataclasses import replace

import numpy as np
import pytest

from permille.errors import InputError
from permille_lab.evaluate.personal import (
    COMPARISONS,
    FURTHER,
    PersonalOutcome,
    State,
    markdown,
    personal_tests,
)

OF_FOUR = [pair for pair in COMPARISONS if not set(pair) & set(FURTHER)]


def outcome(user: str, base: float, own: float, pooled: float, swapped: float) -> PersonalOutcome:
    losses = {State.BASE: base, State.OWN: own, State.POOLED: pooled, State.SWAPPED: swapped}
    return PersonalOutcome(
        user=user,
        nats={state: 100 * loss for state, loss in losses.items()},
        tokens=100,
        bytes=250,
        train_tokens=300,
        pooled_tokens=299,
    )


def people(count: int = 12, *, personal: float = 0.1, seed: int = 0) -> list[PersonalOutcome]:
    """Text that the domain helps with by 1 nat, and the own text by `personal` more."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        base, noise = 5 + rng.normal(), 0.02 * rng.normal(size=3)
        found.append(
            outcome(
                f"u{number}", base, base - 1 - personal + noise[0], base - 1 + noise[1], base - 0.9 + noise[2]
            )
        )
    return found


def test_a_personal_gain_is_own_against_pooled_and_not_own_against_base() -> None:
    tests = dict(zip(OF_FOUR, personal_tests({"g": people()})["g"], strict=True))
    own_pooled = tests[State.OWN, State.POOLED]
    assert own_pooled.gain == pytest.approx(0.1, abs=0.03)
    assert own_pooled.p_value < 0.01
    assert tests[State.OWN, State.BASE].gain == pytest.approx(1.1, abs=0.03)
    assert tests[State.POOLED, State.BASE].gain == pytest.approx(1.0, abs=0.03)
    assert tests[State.OWN, State.SWAPPED].gain == pytest.approx(0.2, abs=0.03)
    # Where only the domain was learned, the base is beaten all the same.
    only_domain = dict(zip(OF_FOUR, personal_tests({"g": people(personal=0.0)})["g"], strict=True))
    assert only_domain[State.OWN, State.BASE].p_value < 0.01
    assert only_domain[State.OWN, State.POOLED].p_value > 0.2


def test_the_share_of_people_worse_off_is_told() -> None:
    outcomes = [outcome(user, 5, 5.5 if user in "be" else 4, 4.5, 4.4) for user in "abcdef"]
    (own_base, *_) = personal_tests({"g": outcomes})["g"]
    assert own_base.users == 6
    assert own_base.worsened == pytest.approx(1 / 3)
    assert own_base.gain == pytest.approx(0.5)
    assert own_base.median == 1.0
    assert "| own against base | +0.5000 | -0.313 to +1.313 | +1.0000 | 33 % |" in markdown({"g": outcomes})


def test_few_people_are_shown_and_not_tested() -> None:
    """Five could not be significant, whatever they are, and would take from the others' p."""
    tests = personal_tests({"few": people(5), "many": people(6)})
    assert (tests["few"], len(tests["many"])) == ([], len(OF_FOUR))
    assert [test.p_value for test in tests["many"]] == [
        test.p_value for test in personal_tests({"many": people(6)})["many"]
    ]
    page = markdown({"few": people(5)})
    assert "Fewer than 6 people: nothing is tested." in page and page.count("\n| u") == 5


def test_all_comparisons_of_a_page_are_corrected_together() -> None:
    alone = personal_tests({"a": people(6)})["a"]
    together = personal_tests({"a": people(6), "b": people(6, personal=0.0, seed=1)})
    assert sum(test.p_value for test in together["a"]) > sum(test.p_value for test in alone)
    assert [len(tests) for tests in together.values()] == [len(OF_FOUR)] * 2


def test_perplexity_and_bits_per_byte_are_of_the_test_text() -> None:
    found = outcome("a", 5, 4, 4.5, 4.4)
    assert found.perplexity(State.OWN) == pytest.approx(math.exp(4))
    assert found.bits_per_byte(State.BASE) == pytest.approx(500 / math.log(2) / 250)


def test_the_page_holds_every_person_and_every_comparison() -> None:
    page = markdown({"m, c": people(6)})
    assert page.count("\n| u") == 6
    assert page.count(" against ") == len(OF_FOUR)
    assert "| own | " in page
    assert "0 %" in page


def record() -> dict[str, object]:
    return {
        "user": "a",
        "nats": {"base": 5.0, "own": 4.0, "pooled": 4.5, "swapped": 4.6},
        "tokens": 2,
        "bytes": 9,
        "train_tokens": 30,
        "pooled_tokens": 30,
    }


def test_a_record_that_is_no_outcome_is_refused() -> None:
    assert PersonalOutcome.of(record()).loss(State.OWN) == 2.0
    with pytest.raises(InputError, match="four states"):
        PersonalOutcome.of(record() | {"nats": {"base": 5.0}})
    with pytest.raises(InputError, match="finite"):
        PersonalOutcome.of(record() | {"nats": {state.value: math.nan for state in State}})
    with pytest.raises(InputError, match="finite losses of at least 0 and some text"):
        PersonalOutcome.of(record() | {"tokens": 0})
    with pytest.raises(InputError, match="one twice"):
        personal_tests({"g": [*people(2), people(1)[0]]})


def test_states_that_train_on_are_compared_over_who_has_them() -> None:
    """On top of a pooled state by 0.3, of which longer training alone is 0.1."""
    four = people(12)
    six = [
        replace(
            person,
            nats={
                **person.nats,
                State.POOLED_OWN: person.nats[State.OWN] - 30 + number % 3,
                State.OWN_OWN: person.nats[State.OWN] - 10 - number % 2,
            },
        )
        for number, person in enumerate(four)
    ]
    tests = dict(zip(COMPARISONS, personal_tests({"g": six})["g"], strict=True))
    assert tests[State.POOLED_OWN, State.OWN].gain == pytest.approx(0.29)
    assert tests[State.OWN_OWN, State.OWN].gain == pytest.approx(0.105)
    assert tests[State.POOLED_OWN, State.OWN_OWN].gain == pytest.approx(0.185)
    assert tests[State.POOLED_OWN, State.OWN].p_value < 0.01
    # Of who has not: compared without them, and said.
    part = personal_tests({"g": [*six[:-1], four[-1]]})["g"]
    assert [test.users for test in part] == [12] * len(OF_FOUR) + [11] * 4
    page = markdown({"g": [*six[:-1], four[-1]]})
    assert "| pooled-own against own (11 people) | +0.2" in page and "| pooled-own (11 people) |" in page
    assert page.rstrip().splitlines()[-1].count(" - -") == 2
    assert len(personal_tests({"g": [*six[:5], *four[5:]]})["g"]) == len(OF_FOUR)
    page = markdown({"g": six, "h": four})
    assert "perplexity: base, own, pooled, swapped, pooled-own, own-own |" in page
    assert "perplexity: base, own, pooled, swapped |" in page
    assert page.count(" against ") == len(COMPARISONS) + len(OF_FOUR)
    more = record() | {"nats": {state.value: 4.0 for state in State}}
    assert set(PersonalOutcome.of(more).nats) == set(State)
