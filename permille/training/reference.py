"""The reference of a package in training: it pulls towards the base and measures the general loss.

    reference = Reference.of(package)
    batch = reference.pull(step)                    # soft targets: the loss is the divergence from the base
    rise = reference.loss(engine, values_K) - reference.loss(engine, package.values())

`make_reference` makes one with the base of a package that has none, as a build does.

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
TEXT_ROWS = 32  # half of them pull
# Another seed than masks have, so mostly other sequences. Some may have chosen the mask, which does no harm.
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
"""What the reference asks. `show` asks these before and after."""


class Chat(Protocol):
    """The chat template of a model, with its tokenizer."""

    def prompt(self, question: str) -> NDArray[np.int64]:
        """The ids of a conversation in which the user has asked, up to where the answer begins."""
        ...

    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        ...


@dataclass(frozen=True, eq=False)
class Reference:
    """See the module's docstring."""

    rows: ReferenceRows

    @classmethod
    def of(cls, package: Package) -> "Reference | None":
        """Read the reference of a package; None where it has none.

        Raises:
            PackageError: `reference`: the layer is not what it claims to be.
        """
        rows = package.reference_rows()
        return None if rows is None else cls(rows)

    def pull(self, step: int) -> Batch:
        """Two rows with soft targets, a text and a chat turn where there are both: a function of the step."""
        rows = self.rows
        kinds = [np.flatnonzero(rows.pulls_N & (rows.chat_N == chat)) for chat in (False, True)]
        present = [kind for kind in kinds if len(kind)]
        chosen = []
        for place in range(ROWS_A_STEP):
            kind = present[place % len(present)]
            turn = step * (ROWS_A_STEP // len(present)) + place // len(present)
            chosen.append(int(kind[turn % len(kind)]))
        chosen_N = np.array(chosen)
        stops_N = np.cumsum(np.where(rows.pulls_N, rows.targets(), 0))
        named = np.concatenate([np.arange(stops_N[n] - rows.targets()[n], stops_N[n]) for n in chosen])
        return _batch(
            rows,
            chosen_N,
            SoftTargets(ids_RN=rows.named_RS[named], probability_RN=rows.probability_RS[named]),
        )

    def loss(self, engine: Engine, values_K: NDArray[np.float32]) -> float:
        """The loss on the measuring rows, nats a token: the mean over the targets of all of them."""
        return float(engine.token_losses(values_K, self._measuring).mean(dtype=np.float64))

    def questions(self) -> Sequence[str]:
        """The questions whose answers are measured; none where no chat turn is."""
        return MEASURING_QUESTIONS if (self.rows.chat_N & ~self.rows.pulls_N).any() else ()

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

    Args:
        package: without a reference; the light engine must have its mathematics.
        text_NT: token ids of public text, an even number of rows of `TEXT_TOKENS` or fewer; may be empty.
        chat: the model's chat template; None leaves chat turns out.
        made: where the text comes from, for people.

    Returns:
        The manifest of the package with the reference, for `write_manifest`.

    Raises:
        InputError: neither text nor chat, or mathematics that the light engine does not have.
    """
    engine, values_K = LightEngine(package, threads=threads), package.values()
    half = len(text_NT) // 2
    rows = [_Row(ids_T, 1, chat=False, pulls=place < half) for place, ids_T in enumerate(text_NT)]
    if chat is not None:
        for pulls, questions in ((True, PULLING_QUESTIONS), (False, MEASURING_QUESTIONS)):
            answered = (_answered(package, engine, chat, question, pulls) for question in questions)
            rows += [row for row in answered if row is not None]
    if not any(row.pulls for row in rows) or all(row.pulls for row in rows):
        raise InputError("A reference needs text or chat turns to pull with, and others to measure with.")
    found = _rows_of(rows)
    pulling = _batch(found, np.flatnonzero(found.pulls_N), None)
    top = engine.top_tokens(values_K, pulling, NAMED_TOKENS)
    found = _rows_of(rows, top)
    return package.manifest.with_reference(write_reference(package.blobs, found), made)


@dataclass(frozen=True, slots=True)
class _Row:
    ids_T: NDArray[np.int64]
    begin: int
    chat: bool
    pulls: bool


def _answered(package: Package, engine: LightEngine, chat: Chat, question: str, pulls: bool) -> _Row | None:
    """A chat turn with the base's greedy answer; None where there is no room for one, or it is empty."""
    positions = int(package.config.get("max_position_embeddings") or MOST_CHAT_TOKENS)
    prompt_T = chat.prompt(question)
    if len(prompt_T) > min(MOST_CHAT_TOKENS, positions) - ANSWER_TOKENS:
        return None
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
