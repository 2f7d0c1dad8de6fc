"""Text generation with the base and the personal model of the active package.

All variants share one engine and its quantized weights. They differ in the sparse trained values. Texts of
the personal model follow its memory, if it has one.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from permille.engines.interface import Engine, remembering
from permille.engines.key_values import KeyValues
from permille.engines.sampling import TokenSampling
from permille.errors import InputError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille_agent.local.conversations import Conversations
from permille_agent.local.passages import ANSWER_TOKENS, NOTHING, Consulted, asks_about_notes, with_passages
from permille_agent.state.home import Home, first_error
from permille_agent.state.models import Active, active_model, opening, require_active
from permille_agent.text.documents import Learn
from permille_agent.text.tokens import TextTokenizer, package_tokenizer
from permille_agent.training.personal import model_values, personal_memory
from permille_agent.training.run import BegunRun, RunFolder

GENERATION_CONFIG: Final = "generation_config.json"
_SAMPLED: Final = (1.0, 1.0, 50)
"""Defaults of transformers for temperature, top_p and top_k, if a model's file asks for sampling."""


class Variant(StrEnum):
    """Choice of the trained values."""

    BASE = "base"
    PERSONAL = "personal"
    PERSONAL_WITHOUT_MEMORY = "personal-no-memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(TokenSampling):
    """Settings of text generation. `stop` lists texts that end the generation.

    The defaults are for models without settings of their own.
    """

    # At a temperature of 1, a small model writes nonsense. At a low temperature, it repeats itself unless
    # there is a penalty.

    max_new_tokens: int = 128
    temperature: float = 0.2
    top_p: float = 0.9
    repeat_penalty: float = 1.1
    stop: tuple[str, ...] = ()


class _GenerationConfig(BaseModel):
    """The used fields of a `generation_config.json`."""

    do_sample: bool | None = None
    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=10.0)


@dataclass(slots=True)
class Generated:
    """Counts of one generation. They are complete after all pieces of its text were read.

    Attributes:
        notes: passages of the user's text in the prompt. None if they were not searched.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    finish_reason: str = "stop"
    notes: Consulted | None = None


class LocalModel:
    """The opened model in use. Use it as a context manager, because its tokenizer has a child process.

    For example:

        with LocalModel(home, EngineChoice()) as model:
            generated, pieces = model.complete("Once upon", model.variants[0], model.sampling)
            print("".join(pieces))

    Attributes:
        sampling: settings of text generation in the package, or the defaults.
        memory: the memory of the personal model, or None.
    """

    def __init__(
        self,
        home: Home,
        engine_of: Callable[[Package], Engine],
        active: Active | None = None,
        *,
        memory: bool = True,
        notes: bool = False,
    ) -> None:
        """Open the model `active`. None opens the model in use. Without `memory`, its memory is left off.

        With `notes`, passages of the user's text stand before the last question to the default variant, and
        to the personal model without its memory. The base beside a personal model knows nothing of the user.

        Raises:
            OperatorError: no package is installed.
            InputError: the engine cannot use the memory.
            PackageError: the package, the run's state or its memory is damaged.
        """
        self._home, self._in_use = home, active_model(home)
        self.active = active = active or require_active(home)
        self._notes_of = home if notes else None
        with opening(home, active.package):
            self.package = Package.open(BlobFolder(home.blobs), active.package)
            self.tokenizer: TextTokenizer = package_tokenizer(self.package, _learned(home, active))
            self.engine = engine_of(self.package)
        self.sampling = own_sampling(self.package)
        base_K = self.package.values()
        self._after: Engine = self.engine
        self.memory: KeyValues | None = None
        # The default variant comes last, because `variants` reverses this order.
        self._values: dict[Variant, NDArray[np.float32]] = {Variant.BASE: base_K}
        if active.run is not None:
            personal_K = model_values(home, active, self.package)
            self.memory = personal_memory(home, active, self.package) if memory else None
            if self.memory is not None:
                self._after = remembering(self.engine).after(self.memory, self.tokenizer.begins)
                self._values[Variant.PERSONAL_WITHOUT_MEMORY] = personal_K
                personal_K = model_values(home, active, self.package, beside_memory=True)
            self._values[Variant.PERSONAL] = personal_K
        memories = {} if self.memory is None else {Variant.PERSONAL.value: self.memory}
        self._conversations = Conversations(self.engine, memories)

    def __enter__(self) -> "LocalModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep_up(self) -> None:
        """Drop the memory if its text was removed, or if the model was reset, since this object was opened.

        Other processes do that while a server has the model open. The state stays until it is opened again.
        """
        if self.memory is None or self.active.run is None:
            return
        now = active_model(self._home)
        reset = now != self._in_use and (now is None or now.run is None)
        if reset or not RunFolder(self._home.runs / self.active.run).memory.exists():
            self.memory, self._after = None, self.engine
            self._values[Variant.PERSONAL] = self._values[Variant.PERSONAL_WITHOUT_MEMORY]
            # Texts that follow the memory have its keys and values, too.
            self._conversations = Conversations(self.engine)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Available variants, the default first."""
        return tuple(reversed(self._values))

    @property
    def positions(self) -> int:
        """Largest number of tokens of a memory, a prompt and its answer together."""
        return int(self.package.config.get("max_position_embeddings") or 1 << 31)

    def room(self, variant: Variant) -> int:
        """Return the largest number of tokens of a prompt and its answer together."""
        return self.positions - (len(self.memory or ()) if variant is Variant.PERSONAL else 0)

    def values(self, variant: Variant) -> NDArray[np.float32]:
        """Return the values of the masked weights in a variant.

        Raises:
            InputError: the model has no such variant.
        """
        if variant not in self._values:
            raise InputError("There is no personal model. Run `permille-agent train`.")
        return self._values[variant]

    def engine_of(self, variant: Variant) -> Engine:
        """Return the engine of a variant. The personal model's texts follow its memory."""
        return self._after if variant is Variant.PERSONAL else self.engine

    def memory_text(self) -> str:
        """Return the text of the memory, or an empty string without one."""
        return "" if self.memory is None else memory_text_of(self.package, self.memory)

    def complete(self, prompt: str, variant: Variant, sampling: Sampling) -> tuple[Generated, Iterator[str]]:
        """Continue a prompt. Return the counts and an iterator of pieces of text.

        Raises:
            InputError: the prompt is empty or too long, or a setting is out of range.
        """
        return self._generate(self.tokenizer.prompt(prompt), variant, sampling)

    def reply(
        self, messages: Sequence[tuple[str, str]], variant: Variant, sampling: Sampling
    ) -> tuple[Generated, Iterator[str]]:
        """Generate the assistant's next turn. Return the counts and an iterator of pieces of text.

        Raises:
            InputError: the messages are too long, the model has no chat template, or a setting is out of
                range.
            PackageError: the chat template fails.
        """
        knows_user = variant in (self.variants[0], Variant.PERSONAL_WITHOUT_MEMORY)
        if self._notes_of is None or not self._notes_of.notes.exists() or not knows_user:
            return self._generate(self.tokenizer.chat_prompt(messages), variant, sampling)
        prompt_ids, notes = self._prompt_with_passages(self._notes_of, messages, variant, sampling)
        if not notes.passages and not notes.problem and asks_about_notes(messages):
            return Generated(prompt_tokens=0, notes=notes), iter([NOTHING])
        generated, pieces = self._generate(prompt_ids, variant, sampling)
        generated.notes = notes
        return generated, pieces

    def write(self, prompt: str, variant: Variant, sampling: Sampling) -> str:
        """Return a sample. A chat model answers a question, and continues any other prompt.

        Raises:
            InputError: the prompt is empty or too long, or a setting is out of range.
            PackageError: the chat template fails.
        """
        if self.tokenizer.can_chat and prompt.rstrip().endswith("?"):
            return "".join(self.reply([("user", prompt)], variant, sampling)[1])
        return "".join(self.complete(prompt, variant, sampling)[1])

    def close(self) -> None:
        """End the child process of the tokenizer."""
        self.tokenizer.close()

    def _prompt_with_passages(
        self, home: Home, messages: Sequence[tuple[str, str]], variant: Variant, sampling: Sampling
    ) -> tuple[NDArray[np.int64], Consulted]:
        """Return a chat's prompt, with the passages that fit the last question if there is room for them."""
        answer = min(sampling.max_new_tokens, ANSWER_TOKENS, self.positions // 4)
        room = self.room(variant) - answer
        turns, notes = with_passages(home, messages)
        # A template may refuse a passage with a special token. The question itself is asked below.
        with suppress(InputError):
            if len(prompt_ids := self.tokenizer.chat_prompt(turns)) <= room:
                return prompt_ids, notes
        if notes.passages:
            notes = Consulted(problem="The passages of your notes do not fit beside this conversation.")
        return self.tokenizer.chat_prompt(messages), notes

    def _generate(
        self, prompt_ids: NDArray[np.int64], variant: Variant, sampling: Sampling
    ) -> tuple[Generated, Iterator[str]]:
        # `keep_up` replaces the memory first, so in this order no new conversation has an old memory.
        conversations, memory = self._conversations, self.memory
        generated = Generated(prompt_tokens=len(prompt_ids))
        if variant is Variant.PERSONAL and memory is not None:
            begins = np.array(self.tokenizer.begins, np.int64)
            after = len(begins) if (prompt_ids[: len(begins)] == begins).all() else 0
            prompt_ids = np.concatenate([memory.id_S, prompt_ids[after:]])
            if len(prompt_ids) >= self.positions:
                raise InputError(
                    f"The prompt has {generated.prompt_tokens} tokens, and the model takes {self.positions} "
                    f"for its memory of {len(memory)}, the prompt and the answer together. Shorten the "
                    "prompt, or leave the memory off (--no-memory, or the model personal-no-memory)."
                )
        limit = min(sampling.max_new_tokens, self.positions - len(prompt_ids))
        ids = conversations.generate(
            variant,
            self.values(variant),
            prompt_ids,
            replace(sampling, stop_ids=self.tokenizer.stop_ids),
        )
        pieces = self.tokenizer.stream(_counted(ids, generated, limit))
        return generated, until_stop(pieces, sampling.stop, generated)


def memory_text_of(package: Package, memory: KeyValues) -> str:
    """Return the text of a memory."""
    with closing(package_tokenizer(package)) as tokenizer:
        return tokenizer.decode(memory.id_S.tolist()).strip()


def own_sampling(package: Package) -> Sampling:
    """Return the settings of text generation in a package, or the defaults of `Sampling` if it has none.

    - If the package's file names `do_sample`, a temperature, top_p or top_k, settings that are missing there
      have the defaults of transformers. `do_sample: false` means temperature 0.
    - Otherwise only the repetition penalty is taken from the package.

    Raises:
        PackageError: a setting is out of range.
    """
    if GENERATION_CONFIG not in package.manifest.files():
        return Sampling()
    try:
        found = _GenerationConfig.model_validate(json.loads(package.file(GENERATION_CONFIG)))
    except ValidationError as exc:
        raise PackageError("generation-config", first_error(exc)) from exc
    named = (found.temperature, found.top_p, found.top_k)
    penalty = found.repetition_penalty
    # Many files only name token ids, and say nothing about sampling.
    if found.do_sample is None and all(value is None for value in named):
        return Sampling() if penalty is None else Sampling(repeat_penalty=penalty)
    penalty = penalty or 1.0
    if found.do_sample is False:
        return Sampling(temperature=0.0, top_p=1.0, repeat_penalty=penalty)
    temperature, top_p, top_k = (
        default if value is None else value for value, default in zip(named, _SAMPLED, strict=True)
    )
    return Sampling(
        temperature=float(temperature), top_p=float(top_p), top_k=int(top_k), repeat_penalty=penalty
    )


def _learned(home: Home, active: Active) -> Learn:
    """Return the roles that the active model's run has learned."""
    begun = None if active.run is None else RunFolder(home.runs / active.run).load("run", BegunRun)
    return begun.definition.options.learn if begun else Learn.ASSISTANT


def until_stop(pieces: Iterator[str], stop: Sequence[str], generated: Generated) -> Iterator[str]:
    """Yield pieces of text up to the first stop string. Text that may begin a stop string is held back.

    Example:
        >>> "".join(until_stop(iter(["one E", "ND two"]), ["END"], Generated(prompt_tokens=1)))
        'one '
    """
    held = ""
    for piece in pieces:
        held += piece
        found = [place for word in stop if (place := held.find(word)) >= 0]
        if found:
            generated.finish_reason = "stop"
            if text := held[: min(found)]:
                yield text
            return
        # The end of the text may be the beginning of a stop string.
        keep = max((_overlap(held, word) for word in stop), default=0)
        if text := held[: len(held) - keep]:
            yield text
        held = held[len(held) - keep :]
    if held:
        yield held


def _overlap(text: str, word: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `word`."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-n:])), 0)


def _counted(ids: Iterator[int], generated: Generated, limit: int) -> Iterator[int]:
    for token in ids:
        generated.completion_tokens += 1
        # The reason is set before the token is yielded, because the caller may stop reading here.
        if generated.completion_tokens >= limit:
            generated.finish_reason = "length"
        yield token
