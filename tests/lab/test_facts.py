"""Recall of facts: where they stand in a text, and the contenders on a tiny model."""

from itertools import pairwise
from pathlib import Path

import pytest

from permille_lab.people.user_texts import User
from permille_lab.real.facts import FACTS, TRAINED, UNTRAINED, Recall, _is_right, _with_facts, measure
from tests.packages import CHATML, sentences, tiny_package


def test_facts_stand_in_their_order_among_all_of_a_text() -> None:
    texts = [f"text {number}" for number in range(100)]
    found = _with_facts(texts)

    assert [text for text in found if text in texts] == texts
    assert [text for text in found if text not in texts] == [fact["fact"] for fact in FACTS]
    places = [place for place, text in enumerate(found) if text not in texts]
    assert max(after - before for before, after in pairwise(places)) <= 6


def test_every_fact_has_its_answer_and_every_question_lacks_it() -> None:
    assert len(FACTS) == 20
    assert {
        kind: sum(fact["kind"] == kind for fact in FACTS) for kind in {fact["kind"] for fact in FACTS}
    } == dict.fromkeys(("name", "date", "amount", "place", "relation"), 4)
    for fact in FACTS:
        assert _is_right(fact["fact"], fact["right"])
        assert not _is_right(fact["question"], fact["right"])
    assert not _is_right("He owns 14th place", ["14"])


@pytest.mark.parametrize("contenders", [UNTRAINED, pytest.param(TRAINED, marks=pytest.mark.slow)])
def test_contenders_answer_all_questions(tmp_path: Path, contenders: tuple[Recall, ...]) -> None:
    package = tiny_package(tmp_path, chat_template=CHATML, config={"max_position_embeddings": 1024})
    user = User(name="nobody", documents=tuple({"text": text} for text in sentences(320)))

    result = measure(package, user, contenders, steps=2, threads=1)

    assert list(result["right"]) == list(contenders)
    assert {len(right) for right in result["right"].values()} == {len(FACTS)}
    assert (result["outcome"] is None) == (contenders is UNTRAINED)
