"""A model's answers: candidates ranked by their tokens' log-likelihood.

A candidate's score is the mean log-likelihood of its own tokens after the prompt, over the whole vocabulary.
MeZO and P-RGE do not restrict the loss of the prediction to the label words, either. For label words of one
token, mean and sum are the same. The training loss is the mean negative log-likelihood of the right
candidate's tokens.

# Legend: B sequences, T tokens.
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
"""Text to token ids without special tokens."""

TokenLosses = Callable[[Batch], NDArray[np.float32]]
"""Loss of each target of a batch, row-major: `Engine.token_losses` at some values, or any model's."""


_CHARACTERS_A_TOKEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens of a prompt with one candidate; the last `targets` of them are the candidate's."""

    ids: tuple[int, ...]
    targets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """An example in tokens: one `Answer` for each candidate, all after the same tokens as far as they agree.

    Attributes:
        label: index of the right candidate.
        shots: number of solved examples that fitted before the question.
        cut: number of tokens that did not fit: of the prompt's front, of a document's end.
        span: of a document, its first scored token and the end of the last, in tokens of `document_text`.
    """

    answers: tuple[Answer, ...]
    label: int
    shots: int
    cut: int
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The outcome of an evaluation, item by item, so that two models can be compared in pairs.

    Attributes:
        correct_N: bool, whether the best candidate is the right one; equal scores go to the first.
        loss_N: float64, negative log-likelihood a token of the right candidate.
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

    Demonstrations that do not fit are left out whole, the first ones first. A prompt that is too long by
    itself loses its front. A candidate loses nothing.

    Prompt and candidate are encoded as one text. The boundary is where the prompt's own tokens end, as long
    as they agree. So a candidate is spelled as the model would meet it. All candidates stand after the same
    tokens, and the longest one decides how much fits.

    Args:
        begin: id of the token that begins a text, or None for a model without one.
        max_tokens: of prompt and candidate together, `begin` included.
        demonstrations: solved examples before the prompt (in-context learning), each with its separator.

    Raises:
        InputError: a candidate does not fit.
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
    """Return a document in its own tokens, whatever is before it, so that all methods score the same ones.

    If no token begins a text, nothing predicts its first token. First the prompt's front is cut, as long as a
    quarter of the row is left of it. Then the document's end is cut.
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
    """Return prompt and text of a document as far as they can matter.

    Long ones are not encoded whole for the few tokens that are kept.
    """
    most = _CHARACTERS_A_TOKEN * max_tokens
    return example.prompt[-most:], example.candidates[0][:most]


def training_batch(choices: Sequence[Choices]) -> Batch:
    """The right answers of some examples, padded on the right; targets are the candidates' tokens."""
    return _batch([item.answers[item.label] for item in choices])


def score(token_losses: TokenLosses, choices: Sequence[Choices], *, max_batch_tokens: int = 4096) -> Scored:
    """Score every candidate of every example.

    Args:
        max_batch_tokens: sequences times longest of one call.

    Raises:
        InputError: no example; or the model gave a loss that is not finite.
    """
    if not choices:
        raise InputError("expected examples to score, got none")
    answers = [answer for item in choices for answer in item.answers]
    mean_A = np.empty(len(answers))
    # Sort by length. Then sequences of one call are nearly equally long, and little is padding.
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
    """Loss a token of each right answer, float64 [items], from the losses of `training_batch(items)`."""
    ends = np.cumsum([item.answers[item.label].targets for item in items])
    return np.array([part.mean() for part in np.split(losses_R.astype(np.float64), ends[:-1])])


def prior_losses(items: Sequence[Choices]) -> NDArray[np.float64] | None:
    """Return the loss a token of each right answer under the best guess that is the same for every prompt.

    It is for the loss what the majority is for accuracy. Training that teaches a model only the form of an
    answer, and nothing of the task, ends no lower.

    The guess gives answer `a` of `T_a` tokens, right in a share `s_a` of the items, a probability in
    proportion to `s_a / T_a`. This minimises the mean of losses a token. The frequencies are the items' own,
    so no constant guess is lower on them.

    Returns:
        float64 [len(items)], nats per token; None where the items do not all have the same answers.
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
    """Return the tokens of each answer; None where they are not the same ones everywhere."""
    found = {tuple(_own(answer) for answer in item.answers) for item in items}
    if len(found) != 1:
        return None
    (answers,) = found
    return tuple(len(ids) for ids in answers) if len(answers) > 1 else None


def _own(answer: Answer) -> tuple[int, ...]:
    return answer.ids[-answer.targets :]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common beginning."""
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
