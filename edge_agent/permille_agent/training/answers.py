"""Answers of the base and of a personal model to questions of general knowledge.

A chat model is asked through its chat template. Any other model continues the beginning of a text. Answers
are greedy, so the same model gives the same answers. `permille.training.answers` has the questions and the
rule.

Answers stay on the device, because those of a personal model can reveal its user's text.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.engines.sampling import TokenSampling
from permille.errors import InputError, PackageError
from permille.training.answers import BEGINNINGS, QUESTIONS, Question, fault_of
from permille.training.reference import ANSWER_TOKENS
from permille_agent.text.chat_template import TRAINING_DAY
from permille_agent.text.tokens import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Text of each model after a prompt."""

    prompt: str
    base: str
    personal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseAnswers:
    """The base's right answers, by prompt."""

    texts: Mapping[str, str]


def base_answers(engine: Engine, base_K: NDArray[np.float32], tokenizer: TextTokenizer) -> BaseAnswers:
    """Ask the base all questions, and return the right answers.

    A question has none if the engine writes no text, or if the model's chat template refuses it.

    Raises:
        PackageError: the tokenizer breaks a limit. The run can be resumed.
    """
    texts = {}
    for question in questions(tokenizer):
        with suppress(InputError):
            answer = _answer(engine, base_K, tokenizer, question.prompt)
            if question.is_known(answer):
                texts[question.prompt] = answer
    return BaseAnswers(texts=texts)


def compare_answers(
    engine: Engine, values_K: NDArray[np.float32], tokenizer: TextTokenizer, base: BaseAnswers
) -> tuple[tuple[Sample, ...], str]:
    """Ask a personal model what the base answered rightly, up to the first answer that is worse.

    Returns:
        The answers, and what is wrong with the last of them, or "": `lose the answer to "What ...?"`.
    """
    found: list[Sample] = []
    for question in questions(tokenizer):
        prompt = question.prompt
        if prompt not in base.texts:
            continue
        personal = ""
        with suppress(InputError):  # the logits are not finite
            personal = _answer(engine, values_K, tokenizer, prompt)
        found.append(Sample(prompt=prompt, base=base.texts[prompt], personal=personal))
        if fault := fault_of(question, base=base.texts[prompt], personal=personal):
            return tuple(found), f'{fault} "{prompt}"'
    return tuple(found), ""


def questions(tokenizer: TextTokenizer) -> Sequence[Question]:
    """Return the questions of a chat model, or the beginnings that another model continues."""
    return QUESTIONS if tokenizer.can_chat else BEGINNINGS


def _answer(engine: Engine, values_K: NDArray[np.float32], tokenizer: TextTokenizer, prompt: str) -> str:
    """Return a model's answer.

    Raises:
        InputError: the engine writes no text, the prompt is too long, the logits are not finite, or the chat
            template fails.
        PackageError: the tokenizer breaks a limit.
    """
    if tokenizer.can_chat:
        # A template may print the day. A fixed day gives the same answers in a run that is resumed later.
        try:
            ids_T = tokenizer.chat_prompt([("user", prompt)], today=TRAINING_DAY)
        except PackageError as exc:
            if exc.code != "chat-template":
                raise
            raise InputError(str(exc)) from exc
    else:
        ids_T = tokenizer.prompt(prompt)
    sampling = TokenSampling(max_new_tokens=ANSWER_TOKENS, stop_ids=tokenizer.stop_ids)
    return tokenizer.decode(list(engine.generate(values_K, ids_T, sampling))).strip()
