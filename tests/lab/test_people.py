"""Tests of people under four states: division of their text, training, and significant gains."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from permille.engines.factory import LIGHT, open_engine
from permille.errors import InputError
from permille_agent.embed import TrainOptions, package_tokenizer
from permille_lab.measuring.cells import Cells
from permille_lab.people.page import COMPARISONS, losses_of, people_of, personal_tests, tables
from permille_lab.people.study import Study, targets
from permille_lab.people.user_texts import User, own_words
from permille_lab.people.users import measured
from tests.packages import sentences, tiny_package

RNG = np.random.default_rng(0)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    package = tiny_package(tmp_path / "blobs")
    return Study(
        package=package,
        engine=open_engine(package, LIGHT, threads=1),
        tokenizer=package_tokenizer(package),
        options=TrainOptions(steps=8, row_tokens=32),
        folder=tmp_path / "study",
    )


def people(count: int, *, documents: int = 60) -> list[User]:
    """Return people, each with one of four endings for every sentence."""
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


def test_the_pool_is_as_long_and_holds_nothing_held_out(study: Study) -> None:
    users = people(4)
    # The pool must leave out a stranger's text if the person's held-out text contains it.
    thief = User(name="thief", documents=users[0].documents)
    person = study.person(users[0])
    pool = study.pooled(person, [*users, thief])
    assert targets(pool.train) == targets(person.train)
    # The person's own text selects the state. Otherwise, the choice of a step size would look like a gain.
    assert pool.select == person.select
    held_out = {tuple(document.ids_T.tolist()) for document in (*person.test, *person.select)}
    assert not held_out & {tuple(document.ids_T.tolist()) for document in pool.train}
    assert pool.train[-1].target_T[-1]  # no token follows the last target
    with pytest.raises(InputError, match="other people's text"):
        study.pooled(person, [users[0]])


@pytest.mark.slow
def test_a_person_is_measured_under_four_states(study: Study, tmp_path: Path) -> None:
    users = people(3)
    result = measured(study, users[0], users, forward_steps=4)
    assert result["user"] == "p0"
    assert result["nats"]["own"] < result["nats"]["base"]
    assert len(set(result["nats"].values())) == 4
    person = study.person(users[0])
    assert 30 <= result["tokens"] <= targets(person.test)
    assert result["train_tokens"] == targets(person.train) + targets(person.select)
    assert min(result["seconds"].values()) > 0
    cells = Cells(tmp_path / "people.jsonl")
    for seed in (0, 1):
        cells.keep("people", {"model": "m", "user": "p0", "seed": seed}, result)
    found = people_of(losses_of(cells))
    assert found["own"].tolist() == [pytest.approx(result["nats"]["own"] / result["tokens"])]
    assert "| 2 " in tables(tmp_path)["counts"]


def outcomes(count: int = 12, *, personal: float = 0.1, group: str = "g") -> pd.DataFrame:
    """Return losses that the domain's text lowers by 1 nat, and the own text by `personal` more."""
    base = 5 + RNG.normal(size=count)
    falls = {"own": 1 + personal, "pooled": 1.0, "forward-only": 0.3}
    columns = {state: base - fall + 0.02 * RNG.normal(size=count) for state, fall in falls.items()}
    return pd.DataFrame({"group": group, "user": [f"u{n}" for n in range(count)], "base": base} | columns)


def test_a_personal_gain_is_own_against_pooled_and_not_own_against_base() -> None:
    tests = {test.name: test for _, test in personal_tests(outcomes())}
    assert len(tests) == len(COMPARISONS)
    assert tests["own against pooled"].gain == pytest.approx(0.1, abs=0.03)
    assert tests["own against pooled"].p_value < 0.01
    assert tests["own against base"].gain == pytest.approx(1.1, abs=0.03)
    # If only the domain is learned, the own state still beats the base.
    only_domain = {test.name: test for _, test in personal_tests(outcomes(personal=0.0))}
    assert only_domain["own against base"].p_value < 0.01
    assert only_domain["own against pooled"].p_value > 0.05


def test_few_people_are_not_tested_and_all_comparisons_are_corrected_together() -> None:
    """Five people could not reach significance, but would raise the corrected p-values of the others."""
    many = outcomes(6)
    alone = personal_tests(many)
    assert personal_tests(pd.concat([outcomes(5, group="few"), many])) == alone
    together = personal_tests(pd.concat([many, outcomes(6, personal=0.0, group="h")]))
    assert sum(test.p_value for group, test in together if group == "g") > sum(t.p_value for _, t in alone)
