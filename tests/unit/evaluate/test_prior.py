"""The loss of the answers' frequencies, against the best of many guesses."""

import numpy as np
import pytest

from permille_lab.evaluate.prior import prior_losses
from permille_lab.evaluate.scoring import Answer, Choices


def example(label: int, *, prompt: tuple[int, ...] = (1, 2), answers: tuple[int, ...] = (1, 3)) -> Choices:
    """Answers of so many tokens after the prompt."""
    return Choices(
        answers=tuple(
            Answer(ids=(*prompt, *range(100 * a, 100 * a + size)), targets=size)
            for a, size in enumerate(answers, 1)
        ),
        label=label,
        shots=0,
        cut=0,
    )


def test_no_guess_that_is_the_same_for_every_prompt_is_better() -> None:
    items = [example(label, prompt=(7,) * (1 + n)) for n, label in enumerate([0, 1, 0, 0, 1])]
    found = prior_losses(items)
    assert found is not None
    guesses = np.linspace(0.001, 0.999, 999)
    means = [(-3 * np.log(guess) - 2 * np.log(1 - guess) / 3) / 5 for guess in guesses]
    assert found.mean() == pytest.approx(min(means), abs=1e-6)
    assert found.mean() <= min(means)
    assert found[0] == found[2] == found[3] != found[1] == found[4]


def test_equal_answers_of_two_tokens_share_a_bit() -> None:
    found = prior_losses([example(0, answers=(2, 2)), example(1, answers=(2, 2))])
    assert found is not None
    assert found.tolist() == pytest.approx([np.log(2) / 2] * 2)


def test_an_answer_that_is_never_right_costs_nothing() -> None:
    found = prior_losses([example(0)] * 9)
    assert found is not None
    assert found.tolist() == [0.0] * 9


def test_answers_that_differ_by_example_have_none() -> None:
    of_one_answer = Choices(answers=(Answer(ids=(1, 2), targets=1),), label=0, shots=0, cut=0)
    assert prior_losses([of_one_answer, of_one_answer]) is None  # documents
    assert prior_losses([example(0), example(0, answers=(1, 4))]) is None
    assert prior_losses([]) is None
