"""Compare training with a prompt, by the length of a person's text: `make bench-curve`.

    PERMILLE_DATA=DIR python -m permille_lab.real.curve --text pepys --tokens 1000 3000

The newest tokens of a text are given to each contender, and the same later text of the person judges all:

    base       the package
    prompt     the base after the newest tokens of the text, at most 1,024 or 2,048
    state      the agent's training, at the strength that the agent chooses
    memory     the base after the memory that the agent makes of the text, in 8 bits
    both       the state after its own memory, at its strength beside one

Diaries and plays are judged by their end. The order of tweets is not known, so tweets and the gardener's
notes are divided by a hash, as in `people`. The state is selected as the agent does: by a part of the text
from 5,400 tokens on, else after the last step. The loss on general text is measured with each model
but the prompt.

Judged rows have at most 128 tokens, as in a run's own test.

Each cell is one contender. A stopped run continues with the first unfinished cell.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from permille.engines.interface import Engine, remembering
from permille.engines.key_values import KeyValues
from permille.engines.memory import decode_memory, encode_memory
from permille.training.strength import strength_beside_memory
from permille.zo.estimators import Batch
from permille_agent.embed import NEEDED_TOKENS, TokenizedDocument, TrainOptions, memory_share, memory_tokens
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.machine import machine
from permille_lab.measuring.model_packages import SMOLLM2_FILE, Sources, folder_from_environment
from permille_lab.people.study import Person, targets
from permille_lab.people.user_texts import Collection, User, cohort, read_users
from permille_lab.real.curve_page import MEMORY, PEOPLE, PROMPTS, SIZES, WRITTEN
from permille_lab.real.facts import diary
from permille_lab.real.subjects import (
    A_FIFTH,
    LEAST_CHARACTERS,
    Subject,
    gardener,
    general_batches,
    general_of,
    nats_of,
    open_subject,
)

LEAST_STEPS, MOST_STEPS = 20, 80
_JUDGED_TOKENS, _LONG = 1_000, 10_000
_SELECT_SHARE, _LEAST_SELECT = 0.05, 400
_WATCHED_TOKENS = 64
_STEP_TOKENS = 4 * 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A person's text: the documents that can be learned, the newest last, and those that judge."""

    name: str
    own: Sequence[TokenizedDocument]
    judged: Sequence[TokenizedDocument]

    def newest(self, tokens: int) -> list[TokenizedDocument]:
        """Return the newest documents with at most `tokens` tokens together. The first one may be cut."""
        found: list[TokenizedDocument] = []
        for document in reversed(self.own):
            room = tokens - sum(len(other.ids_T) for other in found)
            if room < 2:
                break
            found.insert(0, document.between(max(0, len(document.ids_T) - room), None))
        return found

    @property
    def tokens(self) -> int:
        """Number of tokens that can be learned."""
        return sum(len(document.ids_T) for document in self.own)


class Curve:
    """What all cells share: the subject and the general text."""

    def __init__(self, subject: Subject, general: Sequence[Batch]) -> None:
        self._subject, self._study, self._general = subject, subject.study, general[A_FIFTH]
        self._package, self._base_K = subject.study.package, subject.study.package.values()

    def text(self, user: User, *, in_order: bool) -> Text:
        """Divide a person's text.

        Args:
            user: the person.
            in_order: whether the documents have an order. If so, the last ones judge.
        """
        if not in_order:
            person = self._study.person(user)
            return Text(name=user.name, own=[*person.train, *person.select], judged=person.test)
        documents = self._study.documents(user)
        first = len(documents)
        while targets(documents[first:]) < _JUDGED_TOKENS:
            first -= 1
        return Text(name=user.name, own=documents[:first], judged=documents[first:])

    def base(self, text: Text) -> Result:
        """Measure the package alone."""
        return self._losses(text, self._study.engine, self._base_K)

    def prompt(self, text: Text, tokens: int) -> Result:
        """Measure the base after the newest tokens of a text."""
        documents = text.newest(tokens)
        ids_S = memory_tokens(documents, self._separator(), tokens)
        begun = time.process_time()
        known = remembering(self._study.engine).read(self._base_K, ids_S)
        seconds = round(time.process_time() - begun, 2)
        nats = nats_of(self._after(known, text), self._base_K, text.judged, self._study.options.row_tokens)
        return {"nats": nats, "positions": len(ids_S), "read_s": seconds}

    def memory(self, text: Text, tokens: int, positions: int) -> Result:
        """Measure the base after a memory of the newest tokens of a text."""
        return self._with_memory(text, self._person(text, tokens), self._base_K, positions)

    def state(self, text: Text, tokens: int, seed: int) -> Result:
        """Train, choose the strength, and measure the state alone."""
        person, begun = self._person(text, tokens), time.process_time()
        trained_K, told = self._trained(person, tokens, seed)
        seconds = round(time.process_time() - begun, 1)
        strength = self._subject.strength(trained_K)
        values_K = self._subject.at(trained_K, strength.eighths)
        found = self._losses(text, self._study.engine, values_K, person)
        told |= {"strength": strength.eighths, "fault": strength.fault, "steps": steps_of(tokens)}
        return found | told | {"train_s": seconds, "machine": machine()}

    def beside(self, text: Text, tokens: int, positions: int, strength: int) -> int:
        """Return the strength of a state beside its memory, as the agent chooses it."""
        share = memory_share(self._person(text, tokens).train, self._separator(), positions)
        return strength_beside_memory(strength, share)

    def both(self, text: Text, tokens: int, positions: int, seed: int, eighths: int) -> Result:
        """Measure the trained state at a strength, with its memory."""
        person = self._person(text, tokens)
        values_K = self._subject.at(self._trained(person, tokens, seed)[0], eighths)
        return self._with_memory(text, person, values_K, positions) | {"strength": eighths}

    def _with_memory(
        self, text: Text, person: Person, values_K: NDArray[np.float32], positions: int
    ) -> Result:
        ids_S = memory_tokens(person.train, self._separator(), positions)
        begun = time.process_time()
        read = remembering(self._study.engine).read(values_K, ids_S)
        seconds = round(time.process_time() - begun, 2)
        data = encode_memory(self._package, None, read)
        engine = self._after(decode_memory(self._package, None, data), text)
        found = self._losses(text, engine, values_K, person)
        found |= {"positions": len(ids_S), "bytes": len(data), "read_s": seconds}
        return found | {"fault": self._subject.fault(engine, values_K)}

    def _losses(
        self, text: Text, engine: Engine, values_K: NDArray[np.float32], person: Person | None = None
    ) -> Result:
        """Return the losses of the judged, the general and the select text, in nats per token."""
        found = {
            "nats": nats_of(engine, values_K, text.judged, self._study.options.row_tokens),
            "general": general_of(engine, values_K, self._general),
            "judged_tokens": targets(text.judged),
        }
        if person is None:
            return found
        if person.select:
            row_tokens = self._study.options.row_tokens
            found["select"] = nats_of(engine, values_K, person.select, row_tokens)
        return found | {"text_tokens": targets(person.train) + targets(person.select)}

    def _person(self, text: Text, tokens: int) -> Person:
        """Return the parts of the newest tokens of a text. A short text has no select part."""
        documents, none = text.newest(tokens), frozenset[str]()
        total, place = targets(documents), len(documents)
        if total >= NEEDED_TOKENS:
            place = int(total / max(_LEAST_SELECT, _SELECT_SHARE * total))
        # Documents at equal distances select, because the newest ones alone would be another kind of text.
        select = documents[place // 2 :: place] if total >= NEEDED_TOKENS else []
        train = [document for document in documents if not any(document is other for other in select)]
        name = f"{text.name}, {tokens}"
        return Person(name=name, train=train, select=select, test=[], held_out_words=none, test_words=none)

    def _trained(self, person: Person, tokens: int, seed: int) -> tuple[NDArray[np.float32], Result]:
        """Return the trained values at full strength. A finished training is not repeated."""
        if not person.select:
            # The agent watches some rows of a short text, and keeps the last state, whose loss is lowest.
            watched: list[TokenizedDocument] = []
            for document in person.train:
                if targets(watched) < _WATCHED_TOKENS:
                    watched.append(document)
            person = replace(person, select=watched)
        options = replace(self._study.options, steps=steps_of(tokens), seed=seed)
        return replace(self._study, options=options).train(person, "curve")

    def _after(self, known: KeyValues, text: Text) -> Engine:
        return remembering(self._study.engine).after(known, text.own[0].bos)

    def _separator(self) -> tuple[int, ...]:
        return self._study.tokenizer.separator()


def steps_of(tokens: int) -> int:
    """Return the steps of a training: two passes over the text, within bounds.

    Example:
        >>> steps_of(1_000), steps_of(10_000), steps_of(30_000)
        (20, 40, 80)
    """
    return min(MOST_STEPS, max(LEAST_STEPS, math.ceil(2 * tokens / _STEP_TOKENS)))


def main() -> None:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, "curve")
    parser.add_argument("--gguf", type=Path, default=SMOLLM2_FILE, help="the model")
    parser.add_argument("--text", nargs="+", metavar="NAME", help="by default, all texts")
    parser.add_argument("--tokens", type=int, nargs="+", default=SIZES)
    parser.add_argument("--positions", type=int, nargs="+", default=[MEMORY], help="sizes of the memory")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="none: without training")
    parser.add_argument("--strengths", type=int, nargs="*", default=[], help="more of them beside the memory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, cells = folder_from_environment("PERMILLE_DATA"), Cells(options.cells)
    subject = open_subject(
        Sources(models=options.folder, data=data),
        options.gguf,
        options.folder,
        trained=0.001,
        options=TrainOptions(seed=0, steps=LEAST_STEPS),
    )
    curve = Curve(subject, general_batches(subject.folder, data))
    speakers = read_users(data, Collection.SHAKESPEARE).users
    *diaries, speaker = WRITTEN
    written = [diary(data, name) for name in diaries]
    written += [user for user in speakers if user.name == speaker]
    everybody = cohort(read_users(data, Collection.LAMP7).users, least_characters=LEAST_CHARACTERS)
    people = {user.name: user for user in (*written, gardener(), *everybody)}
    # The longest texts take as long as all others together, so they come last.
    for most in sorted({min(_LONG, max(options.tokens)), max(options.tokens)}):
        for name in options.text or (*WRITTEN, *PEOPLE):
            text = curve.text(people[name], in_order=people[name] in written)
            cells.once("base", {"text": name}, partial(curve.base, text))
            for tokens in sizes_of(text, [size for size in options.tokens if size <= most]):
                measure(cells, curve, text, tokens, options.positions, options.seeds, options.strengths)


def sizes_of(text: Text, sizes: Sequence[int]) -> list[int]:
    """Return the sizes that a text has. A text that is shorter than the largest one is also used whole."""
    fitting = [size for size in sorted(sizes) if size <= text.tokens]
    # A whole text that is hardly longer than a size would only repeat its cells.
    if len(fitting) == len(sizes) or (fitting and text.tokens < 1.1 * fitting[-1]):
        return fitting
    return [*(size for size in fitting if 2 * size <= text.tokens), text.tokens]


def measure(
    cells: Cells,
    curve: Curve,
    text: Text,
    tokens: int,
    positions: Sequence[int],
    seeds: Sequence[int],
    strengths: Sequence[int] = (),
) -> None:
    """Measure the contenders that get the newest tokens of a text.

    Args:
        cells: the results.
        curve: what all cells share.
        text: the text.
        tokens: how many of its tokens are used.
        positions: sizes of the memory.
        seeds: seeds of the training.
        strengths: strengths of the state beside the memory, other than the one that the agent chooses.
    """
    for size in sorted({min(tokens, prompt) for prompt in PROMPTS}):
        cells.once("prompt", {"text": text.name, "tokens": size}, partial(curve.prompt, text, size))
    given = {"text": text.name, "tokens": tokens}
    for most in positions:
        settings = given | {"positions": most}
        cells.once("memory", settings, partial(curve.memory, text, tokens, most))
    for seed in seeds if tokens > SIZES[0] else ():
        settings = given | {"seed": seed}
        state = cells.once("state", settings, partial(curve.state, text, tokens, seed))
        for most in positions:
            chosen = curve.beside(text, tokens, most, state["strength"])
            sized = settings | {"positions": most}
            cells.once("both", sized, partial(curve.both, text, tokens, most, seed, chosen))
            for other in strengths:
                strength = partial(curve.both, text, tokens, most, seed, other)
                cells.once("strength", sized | {"strength": other}, strength)


if __name__ == "__main__":
    main()
