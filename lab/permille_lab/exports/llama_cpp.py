"""llama.cpp by llama-cpp-python: it computes a GGUF file on the processor alone.

Its cache of keys and values is float32 here, so that a difference is the file's and not the cache's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray


class LlamaCpp:
    """One loaded file. Use it as a context, or close it."""

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
        """Return a text in tokens, with the beginning that the file asks for.

        Special tokens in the text are text.
        """
        return [int(token) for token in self._model.tokenize(text.encode(), add_bos=True, special=False)]

    def chat_template(self) -> str | None:
        """The template that the file holds."""
        found = self._model.metadata.get("tokenizer.chat_template")
        return None if found is None else str(found)

    def answer(self, messages: Sequence[tuple[str, str]], count: int) -> str:
        """The most likely answer of at most `count` tokens, by the template that the file holds."""
        talk = [{"role": role, "content": said} for role, said in messages]
        found = self._model.create_chat_completion(talk, max_tokens=count, temperature=0.0)
        return str(found["choices"][0]["message"]["content"])

    def logits(self, ids_T: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits of one sequence from its beginning: float32 [T, D]."""
        self._model.reset()
        self._model.eval([int(token) for token in ids_T])
        return np.array(self._model.scores[: len(ids_T)], np.float32)

    def greedy(self, ids_T: NDArray[np.int64], count: int) -> list[int]:
        """The most likely continuation."""
        return list(self.stream(ids_T, count))

    def stream(self, ids_T: NDArray[np.int64], count: int) -> Iterator[int]:
        """The same, token by token as it is computed."""
        self._model.reset()
        following = [int(token) for token in ids_T]
        for _ in range(count):
            self._model.eval(following)
            following = [int(np.argmax(self._model.scores[self._model.n_tokens - 1]))]
            yield following[0]
