"""A small language model in numpy behind the engine interface. It starts fast and can learn.

The logits of the next token are a bias for every token plus entries of a table of token pairs. The first
masked values of the package are the biases, the others are entries of the table. The gradient is exact. The
pairs are chosen by the digest of the parent package, so a package with a program has the same engine.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine, EngineInfo
from permille.engines.key_values import KeyValues
from permille.engines.sampling import TokenSampling
from permille.errors import InputError
from permille.package.reader import Package
from permille.zo.estimators import Batch


class BigramEngine:
    """Engine of tests, see `permille.engines.interface.Engine`.

    If the magnitude of a value is above `nan_above`, all losses are NaN.
    """

    def __init__(self, package: Package, *, nan_above: float = np.inf) -> None:
        self._vocabulary = int(package.config["vocab_size"])
        self._k = package.k
        self._nan_above = nan_above
        pairs = self._k - min(self._k, self._vocabulary)
        seed = int.from_bytes(hashlib.sha256(package.manifest.parent().digest.encode()).digest()[:8], "big")
        rng = np.random.Generator(np.random.PCG64(seed))
        self._layer_passes = 0
        self._pairs_P = np.sort(rng.choice(self._vocabulary**2, size=pairs, replace=False))

    @property
    def k(self) -> int:
        return self._k

    @property
    def layer_passes(self) -> int:
        """Return the number of layer passes. The model counts as one layer."""
        return self._layer_passes

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        self._layer_passes += len(values_VK) * len(batch.input_ids_BT)
        means = [self.token_losses(values_K, batch).mean(dtype=np.float64) for values_K in values_VK]
        return np.array(means, dtype=np.float32)

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        """Return the loss and its gradient, which is computed in float64 and rounded once."""
        before_N, after_N = _pairs(batch)
        probability_NV = np.exp(_log_softmax(self._logits(values_K, before_N)))
        probability_NV[np.arange(len(after_N)), after_N] -= 1.0
        table = np.zeros((self._vocabulary, self._vocabulary))
        np.add.at(table, before_N, probability_NV / len(after_N))
        bias = min(self._k, self._vocabulary)
        gradient_K = np.concatenate([table.sum(axis=0)[:bias], table.reshape(-1)[self._pairs_P]])
        return float(self.losses(values_K[None], batch)[0]), gradient_K.astype(np.float32)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        if values_K.shape != (self._k,):
            raise InputError(f"expected {self._k} values, got shape {values_K.shape}")
        before_N, after_N = _pairs(batch)
        log_probability_NV = _log_softmax(self._logits(values_K, before_N))
        losses_N: NDArray[np.float32] = -log_probability_NV[np.arange(len(after_N)), after_N].astype(
            np.float32
        )
        if np.abs(values_K).max() > self._nan_above:
            losses_N[:] = np.nan
        return losses_N

    def generate(
        self, values_K: NDArray[np.float32], prompt_ids: NDArray[np.int64], sampling: TokenSampling
    ) -> Iterator[int]:
        rng = np.random.Generator(np.random.PCG64(sampling.seed))
        last = int(prompt_ids[-1])
        for _ in range(sampling.max_new_tokens):
            logits_V = self._logits(values_K, np.array([last]))[0]
            if sampling.temperature > 0:
                p_V = np.exp(_log_softmax(logits_V[None] / sampling.temperature))[0]
                last = int(rng.choice(self._vocabulary, p=p_V / p_V.sum()))
            else:
                last = int(logits_V.argmax())
            if last in sampling.stop_ids:
                return
            yield last

    def info(self) -> EngineInfo:
        """Return the name "torch", because the schema of reports does not accept an engine of tests."""
        return {"name": "torch", "version": "test", "compute_dtype": "float64", "threads": 1, "device": "cpu"}

    def _logits(self, values_K: NDArray[np.float32], before_N: NDArray[np.int64]) -> NDArray[np.float64]:
        bias = min(self._k, self._vocabulary)
        table = np.zeros(self._vocabulary**2)
        table[self._pairs_P] = values_K[bias:]
        logits_NV: NDArray[np.float64] = table.reshape(self._vocabulary, -1)[before_N]
        logits_NV[:, :bias] += values_K[:bias]
        return logits_NV


class RememberingBigramEngine(BigramEngine):
    """A bigram engine that finds tokens of a memory likelier. See `RememberingEngine`."""

    def __init__(self, package: Package) -> None:
        super().__init__(package)
        self._config, self._known_V = package.config, np.zeros(self._vocabulary)
        self._before = np.empty(0, np.int64)

    def read(self, values_K: NDArray[np.float32], ids: NDArray[np.int64]) -> KeyValues:
        """Return keys that depend on the tokens, and values that also depend on `values_K`."""
        config, ones = self._config, np.ones((len(ids), 1, 1), np.float32)
        head = config["hidden_size"] // config["num_attention_heads"]
        key = ids.astype(np.float32)[:, None, None] * np.ones(
            (config["num_key_value_heads"], head), np.float32
        )
        pair = (key, key * values_K.mean() + ones)
        return KeyValues(id_S=ids, layers=(pair,) * config["num_hidden_layers"])

    def after(self, known: KeyValues, bos: Sequence[int] = ()) -> "RememberingBigramEngine":
        engine = copy.copy(self)
        engine._before = known.id_S
        engine._known_V = np.log1p(np.bincount(known.id_S, minlength=self._vocabulary))
        return engine

    def generate(
        self,
        values_K: NDArray[np.float32],
        prompt_ids: NDArray[np.int64],
        sampling: TokenSampling,
        keep: Callable[[KeyValues], None] | None = None,
    ) -> Iterator[int]:
        written = []
        for token in super().generate(values_K, prompt_ids, sampling):
            written.append(token)
            yield token
        if keep is not None:
            keep(
                self.read(values_K, np.concatenate([self._before, prompt_ids, written[:-1]]).astype(np.int64))
            )

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        tokens = len(self._before) + batch.input_ids_BT.shape[1]
        if tokens > (most := self._config["max_position_embeddings"]):
            raise InputError(f"A sequence has {tokens} tokens, and the model takes at most {most}.")
        return super().token_losses(values_K, batch)

    def _logits(self, values_K: NDArray[np.float32], before_N: NDArray[np.int64]) -> NDArray[np.float64]:
        return super()._logits(values_K, before_N) + self._known_V


def bigram_engine(package: Package) -> Engine:
    return BigramEngine(package)


def _pairs(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    before_BT = np.roll(batch.input_ids_BT, 1, axis=1)
    return before_BT[batch.target_BT], batch.input_ids_BT[batch.target_BT]


def _log_softmax(logits_NV: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits_NV - logits_NV.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
