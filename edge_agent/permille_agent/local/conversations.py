"""Keys and values of the texts that were read last, so that a conversation reads only its new turn.

    conversations = Conversations(engine)
    list(conversations.generate("personal", values_K, first_ids, sampling))
    list(conversations.generate("personal", values_K, longer_ids, sampling))   # reads only what is new

Programs send the whole conversation with each turn. A turn goes on from the longest beginning that it shares
with a text that was read before, token by token. So an edited message, another conversation with the same
system message, and a template that rewrites earlier turns are right, too.

- Logits are those of the whole text up to rounding, so greedy answers have the same tokens.
- The least recently used texts are dropped first. A text beyond the limit keeps its beginning.
- Keys and values can reveal their text. They are in memory only.

An engine that always reads a text from its first token on keeps nothing.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
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
        self._texts: list[tuple[str, KeyValues]] = []  # the one that was used last is the last
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
            shared = [known.common(ids[:-1]) if name == model else 0 for name, known in self._texts]
            memory = self._memories.get(model)
            most = 0 if memory is None else memory.common(ids[:-1])
            if max(shared, default=0) <= most:
                return None if memory is None or not most else memory.first(most)
            best = max(range(len(shared)), key=shared.__getitem__)
            self._texts.append(self._texts.pop(best))
            return self._texts[-1][1].first(shared[best])

    def _keep(self, model: str, known: KeyValues) -> None:
        most = self._most_bytes * len(known) // max(1, known.nbytes)
        if most < len(known):
            known = known.first(most)
            # The views of a beginning would keep the memory of the whole text.
            layers = tuple((key.copy(), value.copy()) for key, value in known.layers)
            known = KeyValues(id_S=known.id_S.copy(), layers=layers)
        with self._lock:
            # This text takes the place of those that it continues.
            others = [
                one for one in self._texts if one[0] != model or known.common(one[1].id_S) < len(one[1])
            ]
            self._texts = [*others, (model, known)]
            while sum(text.nbytes for _, text in self._texts) > self._most_bytes:
                self._texts.pop(0)
