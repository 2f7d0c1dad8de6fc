"""Free text: what a model writes against a loop without any cache, and how it is scored."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from permille.errors import InputError
from permille_lab.evaluate import trainables
from permille_lab.evaluate.examples import Example
from permille_lab.evaluate.free_text import exact_match_of_text, with_candidate, write
from permille_lab.evaluate.scoring import Answer, Choices
from permille_lab.evaluate.trainables import Trainable
from tests.unit.engines.tiny import tiny_model

MASK = {"model.layers.0.mlp.up_proj.weight": np.array([3, 40], np.uint32)}
MAKERS: dict[str, Callable[[Any], Trainable]] = {
    "masked": lambda model: trainables.masked_weights(model, MASK),
    "lora": lambda model: trainables.lora(model, 4, frozen_a=False, seed=0),
    "prefix": lambda model: trainables.prefix(model, 3, seed=0),
    "prefix-real": lambda model: trainables.prefix(model, 3, real=True, seed=0),
}
PROMPTS = ((5, 6, 7, 8), (9, 10), (11, 12, 13))
END = 2


def question(*references: str) -> Example:
    return Example(prompt="Q", candidates=(), label=-1, group="g", name="n", references=references)


def items() -> list[Choices]:
    """Each prompt with an answer of one token, which is never shown."""
    return [
        Choices(answers=(Answer(ids=(*prompt, 90), targets=1),), label=0, shots=0, cut=0)
        for prompt in PROMPTS
    ]


def spelled(ids: Any) -> str:
    return " ".join(f"t{token}" for token in ids)


def most_likely(model: Any, prompt: tuple[int, ...], count: int) -> str:
    """One prompt alone, the whole text again for each token."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens = torch.tensor([ids])
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        following = int(logits[0, -1].argmax())
        if following == END:
            break
        ids.append(following)
    return spelled(ids[len(prompt) :])


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_written_is_the_most_likely_token_by_token(kind: str) -> None:
    trainable = MAKERS[kind](tiny_model("llama"))
    noise_K = np.random.default_rng(0).normal(size=trainable.k).astype(np.float32)
    model = trainable.installed(trainable.base_K + np.float32(0.3) * noise_K)
    expected = [most_likely(model, prompt, 5) for prompt in PROMPTS]
    examples = [question("x"), question(expected[1].upper()), question("x", expected[2] + " t1")]
    found = write(model, items(), examples, spelled, max_new_tokens=5)
    assert list(found.texts) == expected
    assert len(set(expected)) == 3
    assert found.exact_N.tolist() == [False, bool(expected[1]), False]
    assert found.f1_N[1] == 1
    assert 0 < found.f1_N[2] < 1


@pytest.mark.parametrize("kind", MAKERS)
def test_a_models_own_generation_choices_do_not_change_what_is_written(kind: str) -> None:
    texts = []
    for own in ({}, {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "min_new_tokens": 8}):
        base = tiny_model("llama")
        base.generation_config.update(**own)
        trainable = MAKERS[kind](base)
        noise_K = np.random.default_rng(0).normal(size=trainable.k).astype(np.float32)
        model = trainable.installed(trainable.base_K + np.float32(0.3) * noise_K)
        texts.append(write(model, items(), [question("x")] * 3, spelled, max_new_tokens=12).texts)
        for name, value in own.items():
            assert getattr(model.generation_config, name) == value
    assert texts[0] == texts[1]


def test_an_answer_ends_with_its_line() -> None:
    lines = iter(["first\nsecond", "\n\n later \nx", ""])
    found = write(
        tiny_model("llama"),
        items(),
        [question("nothing"), question("First."), question("the later")],
        lambda _: next(lines),
        max_new_tokens=1,
    )
    # Answers are made from the shortest prompt on.
    assert found.texts == ("", "first", "later")
    assert found.exact_N.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("The Eiffel Tower!", ("eiffel tower",), True),
        ("Eiffel", ("eiffel tower",), False),
        ("an apple", ("pear", "Apple"), True),
        ("tower eiffel", ("eiffel tower",), False),
        ("", ("the",), True),
        ("x", (), False),
    ],
)
def test_exact_match_is_squads(prediction: str, references: tuple[str, ...], expected: bool) -> None:
    assert exact_match_of_text(prediction, references) is expected


def test_the_first_reference_is_what_is_learned() -> None:
    found = with_candidate(question(" Paris ", "the city of Paris"))
    assert (found.candidates, found.label) == ((" Paris",), 0)
    assert found.references == (" Paris ", "the city of Paris")
    assert with_candidate(found) is found
    with pytest.raises(InputError, match="candidates or references"):
        with_candidate(question())


def test_numbers_that_differ_are_refused() -> None:
    with pytest.raises(InputError, match="3 and 1"):
        write(None, items(), [question("x")], spelled)
    with pytest.raises(InputError, match="0 and 0"):
        write(None, [], [], spelled)
