"""Tasks that are answered in free text (SQuAD): what a model writes, against the references.

Training and validation learn the first reference after the prompt, as a task with one candidate. Tests let
the model write greedily up to a line's end or a limit, and score what it wrote by exact match and F1 with
SQuAD's official normalisation: no case, no punctuation, no articles, single spaces (`scoring.words`).

# Legend: B sequences, T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from permille.errors import InputError
from permille_lab.evaluate.examples import Example
from permille_lab.evaluate.scoring import Choices, f1_of_text, words

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, without special tokens."""

MAX_NEW_TOKENS = 32
BATCH_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written, item by item.

    Attributes:
        texts: up to the first line's end.
        exact_N: bool, whether it is one of the references.
        f1_N: float64, overlap of words with the best reference.
    """

    texts: tuple[str, ...]
    exact_N: NDArray[np.bool_]
    f1_N: NDArray[np.float64]


def with_candidate(example: Example) -> Example:
    """An example with a right candidate to learn: free text gets its first reference.

    Raises:
        InputError: neither candidates nor references.
    """
    if example.candidates:
        return example
    if not example.references:
        raise InputError(f"expected candidates or references in {example.name}, got neither")
    return replace(example, candidates=(f" {example.references[0].strip()}",), label=0)


def write(
    model: Any,
    items: Sequence[Choices],
    examples: Sequence[Example],
    decode: Decode,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Written:
    """Let the model answer every example and score what it writes.

    Args:
        model: a transformers model (adapters of peft included) with the values to be tested in place.
        items: the examples in tokens, each with one answer, whose tokens are not shown to the model.
        examples: the same, with references.

    Raises:
        InputError: numbers of items and examples that differ, or none.
    """
    if not items or len(items) != len(examples):
        raise InputError(f"expected as many items as examples, got {len(items)} and {len(examples)}")
    prompts = [item.answers[0].ids[: -item.answers[0].targets] for item in items]
    # By length: prompts of one call are nearly equally long, so little is padding.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts = [""] * len(prompts)
    for first in range(0, len(order), BATCH_SIZE):
        part = order[first : first + BATCH_SIZE]
        for index, ids in zip(part, _greedy(model, [prompts[i] for i in part], max_new_tokens), strict=True):
            texts[index] = decode(ids).strip().split("\n", 1)[0].strip()
    pairs = [(text, example.references) for text, example in zip(texts, examples, strict=True)]
    return Written(
        texts=tuple(texts),
        exact_N=np.array([exact_match_of_text(*pair) for pair in pairs], dtype=np.bool_),
        f1_N=np.array([f1_of_text(*pair) for pair in pairs]),
    )


def exact_match_of_text(prediction: str, references: Sequence[str]) -> bool:
    """SQuAD's exact match: the same words in the same order as some reference, as they are normalised."""
    return any(words(prediction) == words(reference) for reference in references)


def _greedy(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """The most likely token again and again, up to an end token or the limit. Padded on the left."""
    longest = max(map(len, prompts))
    ids_BT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    attention_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention_BT[row, longest - len(prompt) :] = 1
    ends = _end_tokens(model)
    with torch.no_grad(), _plain_generation(model, ends):
        whole_BT = model.generate(
            input_ids=ids_BT,
            attention_mask=attention_BT,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
        )
    return [_until(row[longest:], ends) for row in whole_BT.tolist()]


@contextmanager
def _plain_generation(model: Any, ends: frozenset[int]) -> Iterator[None]:
    """Without the model's own choices but for its end tokens.

    `generate` fills all that a call leaves open from the model's `generation_config.json`, even into a
    configuration that it is given: a repetition penalty in there would change what "most likely" means.
    """
    from transformers import GenerationConfig

    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # adapters ask their base
    own = base.generation_config
    base.generation_config = GenerationConfig(eos_token_id=sorted(ends) or None)
    try:
        yield
    finally:
        base.generation_config = own


def _until(ids: list[int], ends: frozenset[int]) -> list[int]:
    return ids[: next((place for place, token in enumerate(ids) if token in ends), len(ids))]


def _end_tokens(model: Any) -> frozenset[int]:
    found = model.generation_config.eos_token_id
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
