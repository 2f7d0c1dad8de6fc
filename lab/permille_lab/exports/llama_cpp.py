"""A GGUF file in llama.cpp on the CPU, by the server of the `xllamacpp` wheel.

The key-value cache is float32, and attention is computed in float32, which llama.cpp's flash attention does
not do. So differences come from the file.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
from numpy.typing import NDArray

_TIMEOUT_S = 600


class LlamaCpp:
    """One loaded file. Use it in a `with` block, which closes it."""

    def __init__(self, path: Path, *, context: int, threads: int = 1, lora: Path | None = None) -> None:
        """Load a file, and perhaps an adapter, for sequences of at most `context` tokens."""
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.swa_full = True
        params.warmup = params.fit_params = False
        params.verbosity = -1
        if lora is not None:
            adapter = xllamacpp.CommonAdapterLoraInfo()
            adapter.path, adapter.scale = str(lora), 1.0
            params.lora_adapters = [adapter]
        self._server = xllamacpp.Server(params)
        self._http = httpx.Client(base_url=self._server.listening_address, timeout=_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        # The server ends with its object.
        del self._server

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        """Return the tokens of a text as a prompt, after the tokens that the file puts before each text.

        Names of special tokens in the text are plain text, unless `special` is set. The server sets it for
        prompts of programs.
        """
        request = {"content": text, "add_special": True, "parse_special": special}
        return [int(token) for token in self._ask("/tokenize", request)["tokens"]]

    def chat_template(self) -> str | None:
        """Return the chat template of the file, None if it has none."""
        found = self._http.get("/props").raise_for_status().json()["chat_template"]
        return str(found) or None

    def chat_tokens(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens of a conversation up to the answer, by the chat template of the file."""
        prompt = self._ask("/apply-template", {"messages": _as_dicts(messages)})["prompt"]
        return self.tokens(prompt, special=True)

    def answer(self, messages: Sequence[tuple[str, str]], count: int) -> str:
        """Return the greedy answer of at most `count` tokens, by the chat template of the file."""
        request = {"messages": _as_dicts(messages), "max_tokens": count, "temperature": 0}
        return str(self._ask("/v1/chat/completions", request)["choices"][0]["message"]["content"])

    def log_probs(self, ids_T: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the log-probabilities of the next token at each position of a sequence, float64 [T, D].

        The server returns them only for a token that it generates. So it gets each prefix of the sequence,
        most of which is in its cache. It returns none for a part of a character. So a bias makes it generate
        a letter. The log-probabilities are those without the bias.
        """
        ids = [int(token) for token in ids_T]
        letter = self._ask("/tokenize", {"content": "a"})["tokens"][-1]
        request = {"n_predict": 1, "temperature": 0, "n_probs": 1 << 20, "logit_bias": [[letter, 1e6]]}
        found = []
        for length in range(1, len(ids) + 1):
            answer = self._ask("/completion", {**request, "prompt": ids[:length]})
            (told,) = answer["completion_probabilities"]
            log_prob = {item["id"]: item["logprob"] for item in told["top_logprobs"]}
            found.append([log_prob[token] for token in range(len(log_prob))])
        found_TD = np.array(found, np.float64)
        # The server rounds probabilities to float32, so their sum is not exactly one.
        normal_TD: NDArray[np.float64] = found_TD - np.log(np.exp(found_TD).sum(axis=1, keepdims=True))
        return normal_TD

    def greedy(self, ids_T: NDArray[np.int64], count: int) -> list[int]:
        """Return the greedy continuation of `count` tokens. A token that ends a text does not end it."""
        prompt = [int(token) for token in ids_T]
        written: list[int] = []
        while (missing := count - len(written)) > 0:
            request = {"n_predict": missing, "temperature": 0, "return_tokens": True}
            written += self._ask("/completion", {**request, "prompt": prompt + written})["tokens"]
        return written

    def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.post(path, json=request).raise_for_status().json()
        return answer


def _as_dicts(messages: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]
