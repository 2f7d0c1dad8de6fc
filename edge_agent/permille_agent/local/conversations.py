"""Keys and values of the texts that were read last, so that a conversation reads only its new turn.

    conversations = Conversations(engine)
    list(conversations.generate("personal", values_K, first_ids, sampling))
    list(conversations.generate("personal", values_K, longer_ids, sampling))   # reads only what is new

Programs send the whole conversation with each turn. A turn goes on from the longest beginning that it shares
with a text that was read before, token by token. So an edited message, another conversation with the same
system message, and a template that rewrites earlier turns are right, too.

- Logits are those of the whole text up to rounding, so greedy answers have the same tokens.
- The least recently used texts are dropped first. A text beyond the limit keeps its beginning.
- Texts that begin with a memory share its keys and values, and keep only their own.
- Keys and values can reveal their text. They are in memory only.

An engine that always reads a text from its first token on keeps nothing.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine, remembering
from permille.engines.key_values import KeyValues
from permille.engines.sampling import TokenSampling
from permille.errors import InputError
from permille.machine_memory import available_memory

MOST_BYTES: Final = 256 << 20
"""Memory for all texts: 5,800 tokens of SmolLM2-135M, or 4,000 of Llama-3.2-1B."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Text:
    """A text that a model has read: its memory, or None, and what follows."""

    model: str
    memory: KeyValues | None
    own: KeyValues

    @property
    def ids(self) -> NDArray[np.int64]:
        """Return the tokens, int64 [S]."""
        return self.own.id_S if self.memory is None else np.concatenate([self.memory.id_S, self.own.id_S])

    def first(self, tokens: int) -> KeyValues:
        """Return the keys and values of the first tokens, which are more than those of the memory."""
        if self.memory is None:
            return self.own.first(tokens)
        own = self.own.first(tokens - len(self.memory))
        layers = tuple(
            (np.concatenate([before[0], after[0]]), np.concatenate([before[1], after[1]]))
            for before, after in zip(self.memory.layers, own.layers, strict=True)
        )
        return KeyValues(id_S=self.ids[:tokens], layers=layers)


class Conversations:
    """Generates texts with one engine. Calls from several threads are safe."""

    def __init__(
        self, engine: Engine, memories: Mapping[str, KeyValues] = {}, most_bytes: int | None = None
    ) -> None:
        """Keep at most `most_bytes` of keys and values beside the memories.

        The default is `MOST_BYTES`, but at most a quarter of the memory that is free now. The texts of a
        model that has a memory begin with the tokens of the memory.
        """
        if most_bytes is None:
            free_bytes = available_memory()
            most_bytes = MOST_BYTES if free_bytes is None else min(MOST_BYTES, free_bytes // 4)
        self._engine = engine
        self._memories = memories
        self._most_bytes = most_bytes
        self._texts: list[_Text] = []  # the one that was used last is the last
        self._lock = threading.Lock()

    def generate(
        self, model: str, values_K: NDArray[np.float32], ids: NDArray[np.int64], sampling: TokenSampling
    ) -> Iterator[int]:
        """Yield new token ids. See `Engine.generate`.

        Args:
            model: name of the values. The same name always has the same values.
            values_K: float32 [K].
            ids: int64 [T], the whole text so far.
            sampling: the settings.

        Raises:
            InputError: an argument is out of range.
        """
        try:
            engine = remembering(self._engine)
        except InputError:
            return self._engine.generate(values_K, ids, sampling)
        keep = partial(self._keep, model)
        if (known := self._beginning(model, ids)) is not None:
            # A text that is too long is refused below, with its whole length.
            with suppress(InputError):
                return engine.after(known).generate(values_K, ids[len(known) :], sampling, keep)
        return engine.generate(values_K, ids, sampling, keep)

    def _beginning(self, model: str, ids: NDArray[np.int64]) -> KeyValues | None:
        """Return the longest known beginning of a text, without its last token, which must be read."""
        with self._lock:
            shared = [_common(text.ids, ids[:-1]) if text.model == model else 0 for text in self._texts]
            memory = self._memories.get(model)
            most = 0 if memory is None else memory.common(ids[:-1])
            if max(shared, default=0) <= most:
                return None if memory is None or not most else memory.first(most)
            best = max(range(len(shared)), key=shared.__getitem__)
            self._texts.append(self._texts.pop(best))
            text = self._texts[-1]
        return text.first(shared[best])

    def _keep(self, model: str, known: KeyValues) -> None:
        most, memory = self._most_bytes * len(known) // max(1, known.nbytes), self._memories.get(model)
        if memory is not None and known.common(memory.id_S) < len(memory):
            memory = None
        begun = len(memory or ())
        if begun or most < len(known):
            known = known.between(begun, begun + most)
            # The views of a part would keep the memory of the whole text.
            layers = tuple((key.copy(), value.copy()) for key, value in known.layers)
            known = KeyValues(id_S=known.id_S.copy(), layers=layers)
        kept = _Text(model=model, memory=memory, own=known)
        with self._lock:
            # This text takes the place of those that it continues.
            others = [
                one for one in self._texts if one.model != model or _common(kept.ids, one.ids) < len(one.ids)
            ]
            self._texts = [*others, kept]
            while sum(text.own.nbytes for text in self._texts) > self._most_bytes:
                self._texts.pop(0)


def _common(id_S: NDArray[np.int64], id_T: NDArray[np.int64]) -> int:
    return KeyValues(id_S=id_S, layers=()).common(id_T)
