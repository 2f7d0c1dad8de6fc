"""The reference of a package: rows that keep a personal model close to the base.

Some rows pull each training step towards the base's own predictions. The other rows measure the loss
on general text.

    reference = Reference.of(package)
    batch = reference.pull(step)      # soft targets: the loss is the divergence from the base
    rise = reference.loss(engine, values_K) - reference.loss(engine, package.values())

A build calls `make_reference` to make the reference with the package's own base.

Shapes: N rows, T tokens of a row, R targets, K masked weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from permille.digests import JSON
from permille.engines.interface import Engine
from permille.engines.light.engine import LightEngine
from permille.engines.sampling import TokenSampling
from permille.errors import InputError
from permille.package.manifest import Manifest
from permille.package.reader import Package
from permille.package.reference_rows import NAMED_TOKENS, ReferenceRows, write_reference
from permille.zo.estimators import Batch, SoftTargets

ROWS_A_STEP = 2
TEXT_TOKENS = 64
TEXT_ROWS = 32  # rows of public text: the first half pulls, the second half measures
# The seed for sampling the reference's texts. Masks sample their texts with smaller seeds, so the two share
# few sequences. A shared sequence does no harm.
REFERENCE_SEED = 1 << 32
ANSWER_TOKENS = 40
MOST_CHAT_TOKENS = 160

PULLING_QUESTIONS = (
    "What is the largest planet in our solar system?",
    "Write a polite two-sentence e-mail that asks for a meeting.",
    "How many days are there in a week?",
    "Explain in one sentence why the sky is blue.",
    "Name three fruits.",
    "Who wrote Romeo and Juliet?",
    "What should I do if I feel tired in the afternoon?",
    "Give me a short recipe for tomato soup.",
)
MEASURING_QUESTIONS = (
    "What is the capital of France?",
    "At what temperature does water boil?",
    "Write one sentence about the sea.",
    "What do bees make?",
)
"""The questions of the measuring chat turns."""


class Chat(Protocol):
    """The chat template of a model, with its tokenizer."""

    def prompt(self, question: str) -> NDArray[np.int64]:
        """Return the token ids of a conversation with one question, up to the start of the answer."""

    def stop_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer."""


@dataclass(frozen=True, eq=False)
class Reference:
    """The reference of a package, for training and measuring. See the module's docstring."""

    rows: ReferenceRows

    @classmethod
    def of(cls, package: Package) -> "Reference | None":
        """Read the reference of a package. Return None if it has none.

        Raises:
            PackageError: `reference`: the layer is malformed.
        """
        rows = package.reference_rows()
        return None if rows is None else cls(rows)

    def pull(self, step: int) -> Batch:
        """Return the two pulling rows of a step, with soft targets.

        They are a text and a chat turn if the reference has both. The same step gives the same rows.
        """
        rows = self.rows
        kinds = [np.flatnonzero(rows.pulls_N & (rows.chat_N == chat)) for chat in (False, True)]
        # Without a chat template, both rows of a step are text. Without public text, both are chat turns.
        present = [kind for kind in kinds if len(kind)]
        chosen = []
        for place in range(ROWS_A_STEP):
            kind = present[place % len(present)]
            # Cycle through texts and through chat turns separately, so that every row is used.
            turn = step * (ROWS_A_STEP // len(present)) + place // len(present)
            chosen.append(int(kind[turn % len(kind)]))
        chosen_N = np.array(chosen)
        # FORMAT 4.12: named tokens (those that a soft target lists) are stored row by row, and only for the
        # targets of pulling rows.
        stops_N = np.cumsum(np.where(rows.pulls_N, rows.targets(), 0))
        named = np.concatenate([np.arange(stops_N[n] - rows.targets()[n], stops_N[n]) for n in chosen])
        return _batch(
            rows,
            chosen_N,
            SoftTargets(ids_RN=rows.named_RS[named], probability_RN=rows.probability_RS[named]),
        )

    def texts(self, *, pulls: bool, chat: bool = False) -> list[Batch]:
        """Return the rows of public text, or the chat turns, one a batch: those that pull or that measure."""
        rows = self.rows
        chosen_N = np.flatnonzero((rows.pulls_N == pulls) & (rows.chat_N == chat))
        return [_batch(rows, chosen_N[n : n + 1], None) for n in range(len(chosen_N))]

    def loss(self, engine: Engine, values_K: NDArray[np.float32]) -> float:
        """Return the loss on the measuring rows: the mean over all their targets, in nats per token."""
        return float(engine.token_losses(values_K, self._measuring).mean(dtype=np.float64))

    @cached_property
    def _measuring(self) -> Batch:
        return _batch(self.rows, np.flatnonzero(~self.rows.pulls_N), None)


def make_reference(
    package: Package,
    *,
    text_NT: NDArray[np.int64],
    chat: Chat | None,
    made: Mapping[str, JSON],
    threads: int | None = None,
) -> Manifest:
    """Make the reference of a package with its own base, and store it as a layer.

        manifest = make_reference(package, text_NT=text_NT, chat=FileChat.find(folder), made={})
        digest = write_manifest(package.blobs, manifest)

    Args:
        package: a package that has no reference yet, and that the light engine can compute.
        text_NT: token ids of public text, in an even number of rows of at most `TEXT_TOKENS`. It
            may be empty.
        chat: the model's chat template. None makes no chat turns.
        made: the origin of the text, for people to read.
        threads: the number of threads. None uses all cores.

    Returns:
        The manifest of the package with the reference, for `write_manifest`.

    Raises:
        InputError: there is neither text nor chat, or the light engine cannot compute the package.
    """
    engine, values_K = LightEngine(package, threads=threads), package.values()
    half = len(text_NT) // 2
    rows = [_Row(ids_T, 1, chat=False, pulls=place < half) for place, ids_T in enumerate(text_NT)]
    if chat is not None:
        for pulls, questions in ((True, PULLING_QUESTIONS), (False, MEASURING_QUESTIONS)):
            answered = (_answered(package, engine, chat, question, pulls) for question in questions)
            rows += [row for row in answered if row is not None]
    if not any(row.pulls for row in rows) or all(row.pulls for row in rows):
        raise InputError(
            "There are too few rows for a reference. Give public text, or use a model with a chat template."
        )
    found = _rows_of(rows)
    pulling = _batch(found, np.flatnonzero(found.pulls_N), None)
    # `top_tokens` needs a batch of the rows, so make the rows first without named tokens, then with them.
    top = engine.top_tokens(values_K, pulling, NAMED_TOKENS)
    found = _rows_of(rows, top)
    return package.manifest.with_part(write_reference(package.blobs, found), made)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the reference. `begin` is the position of its first target."""

    ids_T: NDArray[np.int64]
    begin: int
    chat: bool
    pulls: bool


def _answered(package: Package, engine: LightEngine, chat: Chat, question: str, pulls: bool) -> _Row | None:
    """Return a chat turn with the base's greedy answer, or None if the answer is empty or does not fit."""
    positions = int(package.config.get("max_position_embeddings") or MOST_CHAT_TOKENS)
    prompt_T = chat.prompt(question)
    if len(prompt_T) > min(MOST_CHAT_TOKENS, positions) - ANSWER_TOKENS:
        return None
    # Do not sample, so that the same base gives the same answers.
    sampling = TokenSampling(max_new_tokens=ANSWER_TOKENS, stop_ids=chat.stop_ids())
    answer = list(engine.generate(package.values(), prompt_T, sampling))
    if not answer:
        return None
    return _Row(np.concatenate([prompt_T, np.array(answer, np.int64)]), len(prompt_T), True, pulls)


def _rows_of(rows: Sequence[_Row], top: SoftTargets | None = None) -> ReferenceRows:
    length = max(len(row.ids_T) for row in rows)
    if top is None:
        top = SoftTargets(ids_RN=np.zeros((0, 1), np.int64), probability_RN=np.zeros((0, 1), np.float32))
    return ReferenceRows(
        # Pad with 0, which is a token of every vocabulary. `end_N` says where each row ends.
        ids_NT=np.stack([np.pad(row.ids_T, (0, length - len(row.ids_T))) for row in rows]),
        begin_N=np.array([row.begin for row in rows]),
        end_N=np.array([len(row.ids_T) for row in rows]),
        chat_N=np.array([row.chat for row in rows]),
        pulls_N=np.array([row.pulls for row in rows]),
        named_RS=top.ids_RN,
        probability_RS=top.probability_RN,
    )


def _batch(rows: ReferenceRows, chosen_N: NDArray[np.int64], soft: SoftTargets | None) -> Batch:
    place_T = np.arange(rows.ids_NT.shape[1])
    begin_N1, end_N1 = rows.begin_N[chosen_N, None], rows.end_N[chosen_N, None]
    return Batch(
        input_ids_BT=rows.ids_NT[chosen_N],
        attention_BT=place_T < end_N1,
        target_BT=(place_T >= begin_N1) & (place_T < end_N1),
        soft=soft,
    )
