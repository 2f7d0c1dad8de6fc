"""The reference engine: a package's forward pass by transformers, one variant and one sequence at a time.

It is slow and simple, and computes in float32 on a CPU. Tests compare the fast engines with it. All weights
are decoded at once. The gradient comes from torch's autograd. Means of losses are float64.

# Legend: V variants, K masked weights, T tokens of a sequence, R target tokens, D vocabulary.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from permille.engines.inputs import ModelLimits, check_batch, check_prompt, check_values
from permille.engines.interface import EngineInfo
from permille.engines.sampling import TokenSampling, next_token
from permille.engines.torch_engine import divergence
from permille.package.reader import Package
from permille.version import __version__
from permille.zo.estimators import Batch, SoftTargets
from permille_lab.measuring.decoded_model import load_decoded_model

_Sequence = tuple[Tensor, Tensor, SoftTargets | None]


class ReferenceEngine:
    """An implementation of `permille.engines.interface.GradientEngine`, which documents the methods."""

    def __init__(self, package: Package) -> None:
        """Decode the package's weights and build its model.

        Raises:
            InputError: the model family is unknown.
        """
        self._model = load_decoded_model(package)
        self._counts = package.counts
        self._limits = ModelLimits(
            k=package.k, vocabulary=self._model.vocabulary, positions=self._model.positions
        )
        self._lock = threading.Lock()
        self._layers = int(package.config["num_hidden_layers"])
        self._layer_passes = 0

    @property
    def k(self) -> int:
        """Number of masked weights of the package."""
        return self._limits.k

    def info(self) -> EngineInfo:
        """Return name, versions, compute dtype, threads and device."""
        return EngineInfo(
            name="reference",
            version=f"permille {__version__}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}",
            compute_dtype="float32",
            threads=torch.get_num_threads(),
            device="cpu",
        )

    @property
    def layer_passes(self) -> int:
        """Number of passes of a sequence through a decoder layer so far, forward and backward."""
        return self._layer_passes

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return each variant's mean loss over the batch's targets, float32 [V]."""
        check_values(values_VK, self._limits)
        with np.errstate(invalid="ignore", over="ignore"):
            means = [self.token_losses(values_K, batch).mean(dtype=np.float64) for values_K in values_VK]
            return np.array(means).astype(np.float32)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the loss of each target token, float32 [R], in row-major order of the batch."""
        check_values(values_K[None], self._limits)
        batch = check_batch(batch, self._limits, soft=True)
        with self._lock, torch.no_grad():
            value_K = torch.tensor(values_K)
            parts = [self._sequence_losses(value_K, *sequence) for sequence in _sequences(batch)]
            losses_R: NDArray[np.float32] = torch.cat(parts).numpy()
        return losses_R

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        """Return the mean loss and its gradient with respect to the sparse values, float32 [K]."""
        check_values(values_K[None], self._limits)
        batch = check_batch(batch, self._limits, soft=True)
        loss_sum, sum_K = 0.0, np.zeros(self.k)
        with self._lock, torch.enable_grad():
            value_K = torch.tensor(values_K).requires_grad_()
            for sequence in _sequences(batch):
                loss = self._sequence_losses(value_K, *sequence).double().sum()
                (gradient_K,) = torch.autograd.grad(loss, value_K)
                self._layer_passes += self._layers
                loss_sum += float(loss.detach())
                sum_K += gradient_K.numpy()
        targets = int(batch.target_BT.sum())
        return loss_sum / targets, (sum_K / targets).astype(np.float32)

    def generate(
        self, values_K: NDArray[np.float32], prompt_ids: NDArray[np.int64], sampling: TokenSampling
    ) -> Iterator[int]:
        """Yield new token ids one by one, with a key-value cache."""
        check_values(values_K[None], self._limits)
        check_prompt(prompt_ids, self._limits)
        return self._generate(values_K.copy(), prompt_ids.copy(), sampling)

    def _generate(
        self, values_K: NDArray[np.float32], prompt_ids: NDArray[np.int64], sampling: TokenSampling
    ) -> Iterator[int]:
        rng = np.random.Generator(np.random.Philox(sampling.seed))
        written: list[int] = []
        value_K, ids = torch.tensor(values_K), prompt_ids
        room = sampling.max_new_tokens
        if self._limits.positions is not None:
            room = min(room, self._limits.positions - len(prompt_ids))
        # Without a config, the cache keeps every token. The attention mask implements sliding windows.
        cache = transformers.DynamicCache()
        for _ in range(room):
            # Lock for one token only, so that a slow consumer does not block other callers.
            with self._lock, torch.no_grad():
                logits_1D = self._logits(value_K, torch.tensor(ids), 1, past_key_values=cache)
            token = next_token(logits_1D[0].numpy(), sampling, rng, written)
            if token in sampling.stop_ids:
                return
            yield token
            written.append(token)
            ids = np.array([token], dtype=np.int64)

    def _sequence_losses(
        self, value_K: Tensor, ids_T: Tensor, place_R: Tensor, soft: SoftTargets | None
    ) -> Tensor:
        """Return the loss of each target, [R]: `-log p(token | tokens before it)`.

        With soft targets, return the divergence from them.
        """
        self._layer_passes += self._layers
        logits_RD = self._logits(value_K, ids_T, place_R - 1)
        if soft is None:
            return functional.cross_entropy(logits_RD, ids_T[place_R], reduction="none")
        return divergence(logits_RD, torch.tensor(soft.ids_RN), torch.tensor(soft.probability_RN))

    def _logits(self, value_K: Tensor, ids_T: Tensor, keep: Tensor | int, **options: Any) -> Tensor:
        """Return float32 logits of one sequence at the positions `keep`, or at its last `keep` positions."""
        values = dict(zip(self._model.value_names, torch.split(value_K, list(self._counts)), strict=True))
        options |= {"logits_to_keep": keep, "use_cache": "past_key_values" in options}
        output = functional_call(self._model.module, values, (ids_T[None],), options)
        logits: Tensor = output.logits[0]
        return logits


def _sequences(batch: Batch) -> Iterator[_Sequence]:
    """Yield each sequence's tokens up to its last target, the targets' positions, and its soft targets.

    Attention is causal, so later tokens do not change a loss.
    """
    first = 0
    for ids_T, target_T in zip(batch.input_ids_BT, batch.target_BT, strict=True):
        place_R = np.flatnonzero(target_T)
        if len(place_R):
            part = slice(first, first + len(place_R))
            soft = None if batch.soft is None else batch.soft.rows(part)
            first = part.stop
            yield torch.tensor(ids_T[: place_R[-1] + 1]), torch.tensor(place_R), soft
