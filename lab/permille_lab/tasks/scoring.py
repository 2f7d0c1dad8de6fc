"""Tokenization and scoring of examples. The candidate with the highest log-likelihood is the answer.

A candidate's score is the mean log-likelihood of its tokens after the prompt. As in MeZO and P-RGE,
probabilities are over the whole vocabulary and not only over the label words. For label words of one token,
mean and sum are the same. The training loss is the mean negative log-likelihood of the right candidate's
tokens.

# Legend: B sequences, T tokens, R targets, A answers, N examples.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.estimators import Batch
from permille_lab.tasks.examples import Example

Encode = Callable[[str], Sequence[int]]
"""Returns the token ids of a text, without special tokens."""

TokenLosses = Callable[[Batch], NDArray[np.float32]]
"""Returns the loss of each target of a batch in row-major order, as `Engine.token_losses` does."""


_CHARACTERS_A_TOKEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens of a prompt and one candidate. The last `targets` tokens are those of the candidate."""

    ids: tuple[int, ...]
    targets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """An example in tokens.

    Attributes:
        answers: one answer for each candidate.
        label: index of the right candidate.
        shots: number of solved examples that fitted before the question.
        cut: number of tokens that were cut from the front of the prompt or the end of the document.
        span: first scored token of a document and the end of its last one, in tokens of `document_text`.
            None for other tasks.
    """

    answers: tuple[Answer, ...]
    label: int
    shots: int
    cut: int
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The outcome of an evaluation for each item, so that two models can be compared in pairs.

    Attributes:
        correct_N: bool, True if the right candidate has the best score. Of equal scores, the first wins.
        loss_N: float64, negative log-likelihood per token of the right candidate.
    """

    correct_N: NDArray[np.bool_]
    loss_N: NDArray[np.float64]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.correct_N.mean())

    @property
    def loss(self) -> float:
        """Mean loss of the right answers, nats per token."""
        return float(self.loss_N.mean())


def encode_example(
    example: Example,
    encode: Encode,
    *,
    begin: int | None,
    max_tokens: int,
    demonstrations: Sequence[str] = (),
) -> Choices:
    """Return the example in tokens.

    If the text is too long, whole demonstrations are left out, the first one first. If it is still too long,
    the front of the prompt is cut. Candidates are never cut.

    Prompt and candidate are encoded as one text, since a tokenizer may join characters of both. The candidate
    starts at the first token that differs from the tokens of the prompt. All candidates follow the same
    tokens, and the longest one decides how much fits.

    Args:
        begin: id of the token before each text, None if the model has none.
        max_tokens: largest number of tokens of prompt and candidate together, with `begin`.
        demonstrations: solved examples before the prompt (in-context learning), each with its separator.

    Raises:
        InputError: a candidate does not fit, or a document has no token to predict.
    """
    if example.document:
        return _encode_document(example, encode, begin, max_tokens, demonstrations)
    start = () if begin is None else (begin,)
    room = max_tokens - len(start)
    for dropped in range(len(demonstrations) + 1):
        shown = demonstrations[dropped:]
        prompt = "".join(shown) + example.prompt
        wholes = [tuple(encode(prompt + candidate)) for candidate in example.candidates]
        if max(map(len, wholes)) <= room:
            break
    prompt_ids = tuple(encode(prompt))
    cut = max(0, max(map(len, wholes)) - room)
    answers = []
    for candidate, whole in zip(example.candidates, wholes, strict=True):
        targets = len(whole) - _common(prompt_ids, whole)
        if not 0 < targets < len(whole) - cut:
            raise InputError(
                f"expected 1 to {len(whole) - cut - 1} tokens in candidate {candidate!r:.60} of "
                f"{example.name}, after at least one of the prompt, got {targets}"
            )
        answers.append(Answer(ids=(*start, *whole[cut:]), targets=targets))
    return Choices(answers=tuple(answers), label=example.label, shots=len(shown), cut=cut)


def _encode_document(
    example: Example, encode: Encode, begin: int | None, max_tokens: int, demonstrations: Sequence[str]
) -> Choices:
    """Return a document in tokens. It is encoded without the demonstrations.

    All methods thus score the same tokens. Without a token `begin`, the first token of a text is not
    predicted. If the text is too long, the front of the prompt is cut first, but not below a quarter of the
    row. Then the end of the document is cut.
    """
    start = () if begin is None else (begin,)
    room = max_tokens - len(start)
    prompt, text = document_text(example, max_tokens)
    whole = tuple(encode(prompt + text))
    first = _common(tuple(encode(prompt)), whole) if prompt else 0
    front = max(0, first - max(room // 4, room - (len(whole) - first)))
    kept = whole[front : front + room]
    targets = len(kept) - (first - front) - (1 if first == front and not start else 0)
    if targets < 1:
        raise InputError(f"expected a token to predict in {example.name}, got {len(whole)} tokens")
    for dropped in range(len(demonstrations) + 1):
        shown = demonstrations[dropped:]
        before = tuple(encode("".join(shown))) if shown else ()
        if len(before) + len(kept) <= room:
            break
    end = front + len(kept)
    return Choices(
        answers=(Answer(ids=(*start, *before, *kept), targets=targets),),
        label=0,
        shots=len(shown),
        cut=len(whole) - len(kept),
        span=(end - targets, end),
    )


def document_text(example: Example, max_tokens: int) -> tuple[str, str]:
    """Return the prompt and the text of a document, without characters that are certainly cut.

    Thus a long document is not encoded as a whole.
    """
    most = _CHARACTERS_A_TOKEN * max_tokens
    return example.prompt[-most:], example.candidates[0][:most]


def training_batch(choices: Sequence[Choices]) -> Batch:
    """Return the right answers of examples, padded on the right. Targets are the candidates' tokens."""
    return _batch([item.answers[item.label] for item in choices])


def score(token_losses: TokenLosses, choices: Sequence[Choices], *, max_batch_tokens: int = 4096) -> Scored:
    """Score every candidate of every example.

    Args:
        max_batch_tokens: largest number of tokens in one call, padding included.

    Raises:
        InputError: there are no examples, or a loss is not finite.
    """
    if not choices:
        raise InputError("expected examples to score, got none")
    answers = [answer for item in choices for answer in item.answers]
    mean_A = np.empty(len(answers))
    # Sort by length, so that the sequences of one call need little padding.
    order = sorted(range(len(answers)), key=lambda index: len(answers[index].ids))
    for part in _parts(order, answers, max_batch_tokens):
        losses_R = token_losses(_batch([answers[index] for index in part])).astype(np.float64)
        ends = np.cumsum([answers[index].targets for index in part])
        mean_A[part] = [piece.mean() for piece in np.split(losses_R, ends[:-1])]
    if not np.isfinite(mean_A).all():
        raise InputError(f"expected finite losses, got {int((~np.isfinite(mean_A)).sum())} that are not")
    correct, loss, first = [], [], 0
    for item in choices:
        own = mean_A[first : first + len(item.answers)]
        correct.append(int(own.argmin()) == item.label)
        loss.append(own[item.label])
        first += len(item.answers)
    return Scored(correct_N=np.array(correct, dtype=np.bool_), loss_N=np.array(loss))


def mean_losses(losses_R: NDArray[np.float32], items: Sequence[Choices]) -> NDArray[np.float64]:
    """Return each right answer's loss per token, float64 [N], from the losses of `training_batch(items)`."""
    ends = np.cumsum([item.answers[item.label].targets for item in items])
    return np.array([part.mean() for part in np.split(losses_R.astype(np.float64), ends[:-1])])


def prior_losses(items: Sequence[Choices]) -> NDArray[np.float64] | None:
    """Return each right answer's loss per token under the best guess that is the same for every prompt.

    This is the counterpart of the majority, for losses. A model that learns only the form of the answers, and
    nothing about the task, does not get a lower loss.

    Let answer `a` have `T_a` tokens and be right in a share `s_a` of the items. The guess gives it a
    probability proportional to `s_a / T_a`, which minimises the mean loss per token. The shares are those of
    `items`, so no constant guess has a lower loss on them.

    Returns:
        float64 [N], nats per token. None if the items do not all have the same answers.
    """
    tokens = _tokens_of_answers(items)
    if tokens is None:
        return None
    tokens_A = np.array(tokens)
    label_N = np.array([item.label for item in items], dtype=np.intp)
    counts = Counter(label_N.tolist())
    worth_A = np.array([counts[a] for a in range(len(tokens))]) / tokens_A
    loss_N: NDArray[np.float64] = -np.log(worth_A[label_N] / worth_A.sum()) / tokens_A[label_N]
    return loss_N


def _tokens_of_answers(items: Sequence[Choices]) -> tuple[int, ...] | None:
    """Return the number of tokens of each answer. None if items differ in their answers or have only one."""
    found = {tuple(_own(answer) for answer in item.answers) for item in items}
    if len(found) != 1:
        return None
    (answers,) = found
    return tuple(len(ids) for ids in answers) if len(answers) > 1 else None


def _own(answer: Answer) -> tuple[int, ...]:
    return answer.ids[-answer.targets :]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def _parts(order: Sequence[int], answers: Sequence[Answer], most: int) -> Iterator[list[int]]:
    part: list[int] = []
    for index in order:
        if part and (len(part) + 1) * len(answers[index].ids) > most:
            yield part
            part = []
        part.append(index)
    yield part


def _batch(answers: Sequence[Answer]) -> Batch:
    columns = max(len(answer.ids) for answer in answers)
    ids_BT = np.zeros((len(answers), columns), dtype=np.int64)
    attention_BT = np.zeros((len(answers), columns), dtype=np.bool_)
    target_BT = np.zeros((len(answers), columns), dtype=np.bool_)
    for row, answer in enumerate(answers):
        length = len(answer.ids)
        ids_BT[row, :length] = answer.ids
        attention_BT[row, :length] = True
        target_BT[row, length - answer.targets : length] = True
    return Batch(input_ids_BT=ids_BT, attention_BT=attention_BT, target_BT=target_BT)
