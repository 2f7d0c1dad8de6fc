"""People under six states: how a text is divided, what is trained, and which gains are more than luck."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from permille.errors import InputError
from permille.zo.header import EstimatorKind
from permille_agent.embed import TrainOptions, package_tokenizer
from permille_lab.learning.runs import options_for
from permille_lab.measuring.cells import Cells
from permille_lab.people.page import COMPARISONS, State, losses_of, personal_tests, tables
from permille_lab.people.personalise import SPEAKERS, measure
from permille_lab.people.study import Study, targets
from permille_lab.people.user_texts import Collection, User, own_words
from permille_lab.people.users import measured, pairs, settings_of
from tests.bigram_engine import bigram_engine
from tests.packages import sentences, tiny_package

RNG = np.random.default_rng(0)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    package = tiny_package(tmp_path / "blobs")
    return Study(
        package=package,
        engine=bigram_engine(package),
        tokenizer=package_tokenizer(package),
        options=TrainOptions(estimator=EstimatorKind.ONE_SIDED, steps=8, queries=2, row_tokens=32),
        folder=tmp_path / "study",
    )


def people(count: int, *, documents: int = 60) -> list[User]:
    """Each ends every sentence in a way of their own."""
    found = []
    for number in range(count):
        common = sentences(documents, seed=number)
        own = tuple({"text": f"{text} {'xyzw'[number % 4] * 12}"} for text in common)
        found.append(User(name=f"p{number}", documents=own))
    return found


def test_parts_share_no_document_and_the_seed_decides(study: Study) -> None:
    (user,) = people(1)
    person = study.person(user)
    parts = [person.train, person.select, person.test]
    assert sum(map(len, parts)) == len({own_words(row) for row in user.documents})
    assert targets(person.train) > targets(person.test) > targets(person.select) >= 30
    again = study.person(replace(user, documents=user.documents[::-1]))
    assert [targets(part) for part in (again.train, again.select, again.test)] == [*map(targets, parts)]
    other = replace(study, options=replace(study.options, seed=1)).person(user)
    assert other.held_out_words != person.held_out_words


def test_who_wrote_too_little_is_left_out(study: Study) -> None:
    few = User(name="few", documents=({"text": "just this"},))
    with pytest.raises(InputError, match="in each part of few's text"):
        study.person(few)
    found = pairs(study, [few, *people(4)], 3)
    assert [[person.name for person in pair] for pair in found] == [["p0", "p1"], ["p2", "p3"]]


def test_the_pool_is_as_long_and_holds_nothing_held_out(study: Study) -> None:
    users = people(4)
    # A stranger who says what the person's test part says must not teach it.
    thief = User(name="thief", documents=users[0].documents)
    person = study.person(users[0])
    pool = study.pooled(person, [*users, thief])
    assert targets(pool.train) == targets(person.train)
    # What selects is the person's own, or the choice of a step size would pass for a gain.
    assert pool.select == person.select
    held_out = {tuple(document.ids_T.tolist()) for document in (*person.test, *person.select)}
    assert not held_out & {tuple(document.ids_T.tolist()) for document in pool.train}
    assert pool.train[-1].target_T[-1]  # nothing stands after what counts
    with pytest.raises(InputError, match="other people's text"):
        study.pooled(person, [users[0]])


def test_a_pair_is_measured_under_six_states_and_the_same_twice(study: Study, tmp_path: Path) -> None:
    users = people(4)
    (pair,) = pairs(study, users, 2)
    result = measured(study, pair, users)
    first, second = result["people"]
    assert (first["user"], first["stranger"]) == ("p0", "p1")
    own_K, told = study.train(pair[0], "own")
    assert told == first["own_run"]
    assert told["step"] > 0
    assert study.nats(pair[0], own_K) == (first["nats"]["own"], first["tokens"], first["bytes"])
    # Under the other's state it is the other's log.
    assert study.nats(pair[1], own_K)[0] == second["nats"]["swapped"]
    assert first["nats"]["own"] < first["nats"]["base"]
    pooled_K, _ = study.train(study.pooled(pair[0], users), "pooled")
    onward_K, _ = study.train(pair[0], "pooled-own", pooled_K)
    assert not np.array_equal(onward_K, pooled_K)
    assert study.nats(pair[0], onward_K)[0] == first["nats"]["pooled-own"] < first["nats"]["pooled"]
    cells = Cells(tmp_path / "users.jsonl")
    cells.once("users", settings_of(study, "m", Collection.LAMP7, pair), lambda: result)
    losses = losses_of(cells)
    assert losses["user"].tolist() == ["p0", "p1"]
    assert losses["own"].tolist() == [person["nats"]["own"] / person["tokens"] for person in (first, second)]


def test_a_speakers_state_is_read_on_their_text_and_on_anothers(tmp_path: Path) -> None:
    package = tiny_package(tmp_path / "blobs")
    texts = zip(SPEAKERS, (1, 2, 3), strict=True)
    users = {
        name: User(name=name, documents=tuple({"text": text} for text in sentences(250, seed=seed)))
        for name, seed in texts
    }
    found = measure(package, users, SPEAKERS[0], options_for(package, seed=0, steps=20))
    assert found["improvement"] > found["standard_error"] > 0
    assert found["swap"]["speaker"] == SPEAKERS[1]
    assert found["swap"]["improvement"] != found["improvement"]


def outcomes(count: int = 12, *, personal: float = 0.1, group: str = "g") -> pd.DataFrame:
    """Text that the domain helps with by 1 nat, and the own text by `personal` more."""
    base = 5 + RNG.normal(size=count)
    own, pooled, swapped = (base - fall + 0.02 * RNG.normal(size=count) for fall in (1 + personal, 1.0, 0.9))
    columns = {"base": base, "own": own, "pooled": pooled, "swapped": swapped}
    further = {state.value: np.nan for state in (State.POOLED_OWN, State.OWN_OWN)}
    return pd.DataFrame({"group": group, "user": [f"u{n}" for n in range(count)]} | columns | further)


def test_a_personal_gain_is_own_against_pooled_and_not_own_against_base() -> None:
    tests = {test.name: test for _, test in personal_tests(outcomes())}
    assert tests["own against pooled"].gain == pytest.approx(0.1, abs=0.03)
    assert tests["own against pooled"].p_value < 0.01
    assert tests["own against base"].gain == pytest.approx(1.1, abs=0.03)
    assert tests["own against swapped"].gain == pytest.approx(0.2, abs=0.03)
    # Where only the domain was learned, the base is beaten all the same.
    only_domain = {test.name: test for _, test in personal_tests(outcomes(personal=0.0))}
    assert only_domain["own against base"].p_value < 0.01
    assert only_domain["own against pooled"].p_value > 0.05


def test_few_people_are_not_tested_and_all_comparisons_are_corrected_together() -> None:
    """Five could not be significant, whatever they are, and would take from the others' p."""
    many = outcomes(6)
    alone = personal_tests(many)
    assert personal_tests(pd.concat([outcomes(5, group="few"), many])) == alone
    together = personal_tests(pd.concat([many, outcomes(6, personal=0.0, group="h")]))
    assert sum(test.p_value for group, test in together if group == "g") > sum(t.p_value for _, t in alone)


def test_states_that_train_on_are_compared_over_who_has_them() -> None:
    people = outcomes()
    people["pooled-own"], people["own-own"] = people["own"] - 0.3, people["own"] - 0.1
    people.loc[0, ["pooled-own", "own-own"]] = np.nan
    tests = {test.name: test for _, test in personal_tests(people)}
    assert len(tests) == len(COMPARISONS)
    assert tests["pooled-own against own-own"].gain == pytest.approx(0.2)
    assert (tests["pooled-own against own"].users, tests["own against base"].users) == (11, 12)


def test_the_results_of_the_checkout_have_tables() -> None:
    found = tables(Path(__file__).parents[2] / "lab/results")
    assert "own against pooled" in found["gains"]
    assert "reference-7M" in found["speakers"]
