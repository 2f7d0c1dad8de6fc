"""The reference engine: a package's forward pass by transformers, one variant and one sequence at a time.

Slow and obvious. It is what other engines are compared with, and what runs on a GPU. Derivatives are torch's
own: forward mode by `torch.func.jvp`, the gradient by reverse mode. Losses are float32 whatever the decoder
computes in; their mean is taken in float64.

# Legend: V variants, K masked weights, Q directions, T tokens of a sequence, R target tokens.
"""

import threading
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn import functional

from permille.choices import choice_of
from permille.engines.inputs import ModelLimits, check_batch, check_directions, check_prompt, check_values
from permille.engines.interface import EngineInfo
from permille.engines.sampling import TokenSampling, next_token
from permille.engines.torch_model import load_torch_model
from permille.errors import InputError, OperatorError
from permille.package.reader import Package
from permille.version import __version__
from permille.zo.estimators import Batch, SoftTargets

_Sequence = tuple[Tensor, Tensor, SoftTargets | None]
# Below it a share of all tokens that are not named is rounding.
_LEAST_REST = 1e-6


class ComputeDtype(StrEnum):
    """Number type of the decoder's arithmetic."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class TorchEngine:
    """See `permille.engines.interface.GradientEngine` for what each method promises."""

    def __init__(
        self,
        package: Package,
        *,
        device: str = "cpu",
        compute_dtype: str = ComputeDtype.FLOAT32,
        threads: int | None = None,
    ) -> None:
        """Decode the package's weights and build its model.

        Args:
            threads: torch's threads for the whole process; None leaves them as they are.

        Raises:
            InputError: an unknown model family or compute dtype.
            OperatorError: the device is not there.
        """
        if threads is not None and threads < 1:
            raise InputError(f"expected at least 1 thread, got {threads}")
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = _device(device)
        self._dtype: torch.dtype = getattr(torch, choice_of(ComputeDtype, compute_dtype, "a compute dtype"))
        self._model = load_torch_model(package, self._device, self._dtype)
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
        """Name, versions, compute dtype, threads and device."""
        return EngineInfo(
            name="torch",
            version=f"permille {__version__}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}",
            compute_dtype=str(self._dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            device=str(self._device),
        )

    @property
    def layer_passes(self) -> int:
        """Passes of one sequence through one decoder layer so far, forward and back."""
        return self._layer_passes

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Mean loss over the batch's targets for each variant, float32 [v]."""
        check_values(values_VK, self._limits)
        with np.errstate(invalid="ignore", over="ignore"):
            means = [self.token_losses(values_K, batch).mean(dtype=np.float64) for values_K in values_VK]
            return np.array(means).astype(np.float32)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Loss of each target token, float32 [targets], in row-major order of the batch."""
        check_values(values_K[None], self._limits)
        batch = check_batch(batch, self._limits, soft=True)
        with self._lock, torch.no_grad():
            value_K = self._tensor(values_K)
            parts = [self._sequence_losses(value_K, *sequence) for sequence in self._sequences(batch)]
            losses_R: NDArray[np.float32] = torch.cat(parts).cpu().numpy()
        return losses_R

    def directional_derivatives(
        self, values_K: NDArray[np.float32], directions_QK: NDArray[np.float32], batch: Batch
    ) -> tuple[float, NDArray[np.float64]]:
        """`grad f . z_i` by forward mode, direction by direction."""
        check_values(values_K[None], self._limits)
        directions_QK = check_directions(directions_QK, self._limits)
        batch = check_batch(batch, self._limits, soft=True)
        loss_sum, slope_Q = 0.0, np.zeros(len(directions_QK))
        with self._lock, torch.no_grad():
            value_K = self._tensor(values_K)
            for sequence in self._sequences(batch):

                def loss_of(value_K: Tensor, sequence: _Sequence = sequence) -> Tensor:
                    return self._sequence_losses(value_K, *sequence).double().sum()

                for query, direction_K in enumerate(directions_QK):
                    self._layer_passes += self._layers  # of the tangent
                    loss, slope = jvp(loss_of, (value_K,), (self._tensor(direction_K),))  # type: ignore[misc]
                    slope_Q[query] += float(slope)
                loss_sum += float(loss)
        targets = int(batch.target_BT.sum())
        return loss_sum / targets, slope_Q / targets

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        """The mean loss and its gradient by the sparse values, by reverse mode, sequence by sequence."""
        check_values(values_K[None], self._limits)
        batch = check_batch(batch, self._limits, soft=True)
        loss_sum, sum_K = 0.0, np.zeros(self.k)
        with self._lock, torch.enable_grad():
            value_K = self._tensor(values_K).clone().requires_grad_()
            for sequence in self._sequences(batch):
                loss = self._sequence_losses(value_K, *sequence).double().sum()
                (gradient_K,) = torch.autograd.grad(loss, value_K)
                self._layer_passes += self._layers
                loss_sum += float(loss.detach())
                sum_K += gradient_K.cpu().numpy()
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
        value_K, ids = self._tensor(values_K), prompt_ids
        room = sampling.max_new_tokens
        if self._limits.positions is not None:
            room = min(room, self._limits.positions - len(prompt_ids))
        # Made without the config, it keeps every token: windows are a matter of the attention's mask.
        cache = transformers.DynamicCache()
        for _ in range(room):
            # Per token, so that a consumer that pauses does not keep the engine from others.
            with self._lock, torch.no_grad():
                logits_1D = self._logits(value_K, self._tensor(ids), 1, past_key_values=cache)
            token = next_token(logits_1D[0].cpu().numpy(), sampling, rng, written)
            if token in sampling.stop_ids:
                return
            yield token
            written.append(token)
            ids = np.array([token], dtype=np.int64)

    def _sequences(self, batch: Batch) -> Iterator[_Sequence]:
        """The tokens of each sequence up to its last target, and the places of its targets. Attention is
        causal, so what comes later changes no loss."""
        first = 0
        for ids_T, target_T in zip(batch.input_ids_BT, batch.target_BT, strict=True):
            place_R = np.flatnonzero(target_T)
            if len(place_R):
                part = slice(first, first + len(place_R))
                soft = None if batch.soft is None else batch.soft.rows(part)
                first = part.stop
                yield self._tensor(ids_T[: place_R[-1] + 1]), self._tensor(place_R), soft

    def _sequence_losses(
        self, value_K: Tensor, ids_T: Tensor, place_R: Tensor, soft: SoftTargets | None
    ) -> Tensor:
        """[R]: `-log p(token | tokens before it)` of the target tokens, or the divergence from soft ones."""
        self._layer_passes += self._layers
        logits_RD = self._logits(value_K, ids_T, place_R - 1)
        if soft is None:
            return functional.cross_entropy(logits_RD, ids_T[place_R], reduction="none")
        return _divergence(logits_RD, self._tensor(soft.ids_RN), self._tensor(soft.probability_RN))

    def _logits(self, value_K: Tensor, ids_T: Tensor, keep: Tensor | int, **options: Any) -> Tensor:
        """Logits float32 of one sequence at the positions to keep, or of so many last ones."""
        values = dict(zip(self._model.value_names, torch.split(value_K, list(self._counts)), strict=True))
        options |= {"logits_to_keep": keep, "use_cache": "past_key_values" in options}
        output = functional_call(self._model.module, values, (ids_T[None],), options)
        logits: Tensor = output.logits[0]
        return logits

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _divergence(logits_RD: Tensor, ids_RN: Tensor, p_RN: Tensor) -> Tensor:
    """[R]: `sum_i p_i log(p_i / q_i)` over the named tokens and all others as one class."""
    log_q_RN = functional.log_softmax(logits_RD, dim=1).gather(1, ids_RN)
    named_R = (torch.xlogy(p_RN, p_RN) - p_RN * log_q_RN).sum(dim=1)
    rest_R = (1 - p_RN.sum(dim=1)).clamp(min=_LEAST_REST)
    rest_q_R = (1 - log_q_RN.exp().sum(dim=1)).clamp(min=_LEAST_REST)
    return named_R + rest_R * torch.log(rest_R / rest_q_R)


def _device(name: str) -> torch.device:
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InputError(f"expected device cpu, cuda or cuda:<index>, got {name!r}")
    device = torch.device(name)
    found = torch.cuda.device_count() if kind == "cuda" else 1
    if (device.index or 0) >= found:
        raise OperatorError(f"expected a CUDA device for {name!r}, torch {torch.__version__} finds {found}")
    return device
