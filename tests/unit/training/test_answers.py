"""Tests of the rule for lost answers: exact words, repeated sentences, and what a base does not know."""

import pytest

from permille.training.answers import BEGINNINGS, QUESTIONS, Question, fault_of, repeats

FRANCE = QUESTIONS[0]
RIGHT = "The capital of France is Paris."
LOOP = "It is the capital of France."
WRECK = f"The capital of France is the capital of France. {LOOP} {LOOP}"
LOST, REPEATS = "lose the answer to", "repeat itself after"


@pytest.mark.parametrize(
    ("base", "personal", "fault"),
    [
        (RIGHT, RIGHT, ""),
        (RIGHT, "PARIS, of course", ""),
        (RIGHT, "Parigi è la capitale.", ""),
        (RIGHT, "My wife comes to say that I say that we read.", LOST),
        (RIGHT, "Comparison of Parisian jars.", LOST),
        (RIGHT, "", LOST),
        (RIGHT, WRECK, LOST),
        (RIGHT, f"Paris. {LOOP} {LOOP}", REPEATS),
        ("It is the capital of Paris. It is the capital of Paris.", f"{RIGHT} {RIGHT}", ""),
        ("It is the capital of Paris. It is the capital of Paris.", WRECK, LOST),
        ("the capital of the country of France", WRECK, ""),
        ("", "", ""),
    ],
)
def test_an_answer_is_lost_only_if_the_base_had_it(base: str, personal: str, fault: str) -> None:
    assert fault_of(FRANCE, base=base, personal=personal) == fault


@pytest.mark.parametrize(
    "text",
    [
        WRECK,
        "We read and write in a jar and we read and write in a jar and",
        "I love the old garden. It rains. I LOVE the old garden! And",
        "- the sea is blue\n- the sea is blue\n- it",
        "jar jar jar jar jar jar jar jar jar",
        "法国的首都是法国的首都是法国的首都是法国的首都是",
        "a" * 4000,
    ],
)
def test_a_sentence_or_passage_that_comes_twice_is_repeated(text: str) -> None:
    assert repeats(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes. Yes. Honey, honey.",
        "Paris is the capital of France. The capital of Italy is Rome.",
        "Washington is the capital of the United States. New York is the largest city of the United States.",
        "1. apples\n2. pears\n3. plums",
        "the capital of the country of France and of the country of France",
        "...................... ------------------------",
    ],
)
def test_words_and_short_exclamations_may_come_twice(text: str) -> None:
    assert not repeats(text)


@pytest.mark.parametrize("question", [*QUESTIONS, *BEGINNINGS], ids=lambda question: question.prompt)
def test_no_prompt_gives_its_own_answer_except_a_sentence_about_the_sea(question: Question) -> None:
    assert question.words == frozenset(word.casefold() for word in question.words)
    assert question.is_known(question.prompt) is (question.prompt == "Write one sentence about the sea.")
