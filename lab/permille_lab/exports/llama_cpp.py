"""A GGUF file in llama.cpp on the CPU, by llama-cpp-python.

The key-value cache is float32, so that differences come from the file and not from the cache.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray


class LlamaCpp:
    """One loaded file. Use it in a `with` block, which closes it."""

    def __init__(self, path: Path, *, context: int, threads: int = 1) -> None:
        """Load a file for sequences of at most `context` tokens."""
        import llama_cpp

        self._context = context
        self._model = llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_batch=context,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,
            swa_full=True,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            verbose=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model.close()

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, after the token that the file puts before each text.

        Names of special tokens in the text are plain text.
        """
        return [int(token) for token in self._model.tokenize(text.encode(), add_bos=True, special=False)]

    def chat_template(self) -> str | None:
        """Return the chat template of the file, None if it has none."""
        found = self._model.metadata.get("tokenizer.chat_template")
        return None if found is None else str(found)

    def answer(self, messages: Sequence[tuple[str, str]], count: int) -> str:
        """Return the greedy answer of at most `count` tokens, by the chat template of the file."""
        talk = [{"role": role, "content": said} for role, said in messages]
        found = self._model.create_chat_completion(talk, max_tokens=count, temperature=0.0)
        return str(found["choices"][0]["message"]["content"])

    def logits(self, ids_T: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits of one sequence at all positions, float32 [T, D]."""
        self._model.reset()
        self._model.eval([int(token) for token in ids_T])
        return np.array(self._model.scores[: len(ids_T)], np.float32)

    def greedy(self, ids_T: NDArray[np.int64], count: int) -> list[int]:
        """Return the greedy continuation of `count` tokens."""
        return list(self.stream(ids_T, count))

    def stream(self, ids_T: NDArray[np.int64], count: int) -> Iterator[int]:
        """Yield the greedy continuation token by token."""
        self._model.reset()
        following = [int(token) for token in ids_T]
        for _ in range(count):
            self._model.eval(following)
            following = [int(np.argmax(self._model.scores[self._model.n_tokens - 1]))]
            yield following[0]
