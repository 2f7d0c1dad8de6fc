"""The torch engine, for a CPU or a GPU. It runs all variants and rows of a batch together.

    engine = TorchEngine(package, device="cuda", compute_dtype="bfloat16")
    losses_V = engine.losses(values_VK, batch)

Weights stay in the codes of the package (`coded_layers`). Work that variants share is done once
(`variants`). torch's reverse mode computes gradients. For gradients, each decoder layer keeps only its input
and recomputes the rest. Losses are float32 for any compute dtype, and their mean is computed in float64.

# Legend: V variants, K masked weights, B sequences, T tokens, L target tokens, G groups of variants that have
# had the same values so far, H hidden size, D vocabulary, N tokens that a soft target lists, S = G * L.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import bitsandbytes
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from permille.choices import choice_of
from permille.engines.coded_layers import as_tensor
from permille.engines.coded_model import CodedModel, load_coded_model
from permille.engines.inputs import ModelLimits, check_batch, check_prompt, check_values
from permille.engines.interface import REVERSE_PASSES, EngineInfo
from permille.engines.sampling import TokenSampling, generate_tokens, new_tokens
from permille.engines.variants import Groups, first_masked, layer_spans, run_variants
from permille.errors import InputError, OperatorError
from permille.package.reader import Package
from permille.version import __version__
from permille.zo.estimators import Batch, SoftTargets

DEFAULT_MAX_TOKENS = 4096
"""The largest number of tokens of all variants in one pass. It bounds the memory for activations."""
# Lower bound for the total probability of the tokens that a soft target does not list. A smaller total is
# only rounding error.
_LEAST_REST = 1e-6


class ComputeDtype(StrEnum):
    """Number type of the decoder."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Some rows of a batch, up to the token before their last target.

    Attributes:
        ids_BT: the token ids.
        place_L: the index of the token before each target, with the rows joined end to end.
        target_L: the target tokens.
        soft: soft targets, or None.
    """

    ids_BT: Tensor
    place_L: Tensor
    target_L: Tensor
    soft: SoftTargets | None


class TorchEngine:
    """See `permille.engines.interface.GradientEngine` for what each method promises."""

    def __init__(
        self,
        package: Package,
        *,
        device: str = "cpu",
        compute_dtype: str = ComputeDtype.FLOAT32,
        threads: int | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        """Copy the codes of a package to the device.

        Args:
            package: the package.
            device: "cpu", "cuda" or "cuda:<index>".
            compute_dtype: "float32" or "bfloat16".
            threads: the number of torch's threads in the whole process. None keeps torch's setting.
            max_tokens: the largest number of tokens of all variants in one pass. Larger calls run in parts.

        Raises:
            InputError: the model family or compute dtype is unknown, or a number is out of range.
            OperatorError: the device does not exist.
        """
        if threads is not None and threads < 1:
            raise InputError(f"threads must be at least 1, got {threads}.")
        if max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {max_tokens}.")
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch_device(device)
        self._dtype: torch.dtype = getattr(torch, choice_of(ComputeDtype, compute_dtype, "a compute dtype"))
        self._model = load_coded_model(package, self._device, self._dtype)
        self._counts, self._max_tokens = package.counts, max_tokens
        self._limits = ModelLimits(
            k=package.k, vocabulary=self._model.vocabulary, positions=self._model.positions
        )
        self._lock = threading.Lock()
        self._spans = layer_spans(package)
        self._layer_passes = 0

    @property
    def k(self) -> int:
        """Number of trained values of the package: masked weights, or an adapter's numbers."""
        return self._limits.k

    @property
    def layer_passes(self) -> int:
        """Count passes of one sequence through one decoder layer so far, forward and backward."""
        return self._layer_passes

    @property
    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes that the model holds between calls, by the last part of the tensors' names."""
        found, module = Counter[str](), self._model.module
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found[name.rpartition(".")[2]] += tensor.nbytes
        return dict(found)

    def info(self) -> EngineInfo:
        """Return name, versions, compute dtype, threads and device."""
        return EngineInfo(
            name="torch",
            version=f"permille {__version__}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, bitsandbytes {bitsandbytes.__version__}",
            compute_dtype=str(self._dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            device=str(self._device),
        )

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the mean loss over the batch's targets for each variant, float32 [V]."""
        check_values(values_VK, self._limits)
        losses_VL = self._token_losses(values_VK, check_batch(batch, self._limits, soft=True))
        # NaN and infinite losses are valid results, so numpy must not warn of them.
        with np.errstate(invalid="ignore", over="ignore"):
            losses_V: NDArray[np.float32] = losses_VL.mean(axis=1, dtype=np.float64).astype(np.float32)
        return losses_V

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the loss of each target token, float32 [targets], in row-major order of the batch."""
        check_values(values_K[None], self._limits)
        losses_L: NDArray[np.float32] = self._token_losses(
            values_K[None], check_batch(batch, self._limits, soft=True)
        )[0]
        return losses_L

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        """Return the mean loss and its gradient with respect to the trained values, by reverse mode."""
        check_values(values_K[None], self._limits)
        batch = check_batch(batch, self._limits, soft=True)
        # Add up the parts in float64, so that the division into parts hardly changes the result.
        loss_sum, sum_K = 0.0, np.zeros(self.k)
        layers, lowest = len(self._spans), first_masked(self._spans)
        with self._lock, torch.enable_grad():
            values_1K = self._tensor(values_K[None]).requires_grad_()
            self._model.set_values(values_1K, self._counts)
            for rows in self._parts(batch, 1):
                run = _VariantsPass(self._model, self._counts, rows.ids_BT)
                state = run.through(layers)
                loss = self._losses_of(rows, state).double().sum()
                (gradient_1K,) = torch.autograd.grad(loss, values_1K)
                # `run` has counted the first forward pass. The second forward pass and the reverse pass cover
                # only the layers from the lowest masked one on.
                above = (REVERSE_PASSES - 1) * (layers - lowest) * len(rows.ids_BT)
                self._layer_passes += run.layer_passes + above
                loss_sum += float(loss.detach())
                sum_K += gradient_1K[0].cpu().numpy()
            self._model.clear_values()
        targets = int(batch.target_BT.sum())
        return loss_sum / targets, (sum_K / targets).astype(np.float32)

    def generate(
        self, values_K: NDArray[np.float32], prompt_ids: NDArray[np.int64], sampling: TokenSampling
    ) -> Iterator[int]:
        """Yield new token ids one by one, with a key-value cache."""
        check_values(values_K[None], self._limits)
        check_prompt(prompt_ids, self._limits)
        values_1K = self._tensor(values_K[None])
        # A cache that is made without a config keeps every token, even for layers with a sliding window. The
        # attention mask applies the window.
        cache = transformers.DynamicCache()

        def next_logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
            # The lock is taken for each token, so a consumer that pauses does not block other callers.
            with self._lock, torch.no_grad():
                self._model.set_values(values_1K, self._counts)
                # The last hidden state alone predicts the next token, so the head computes one row.
                self._model.head.place_L = torch.tensor([len(ids) - 1], device=self._device)
                found = self._model.module(self._tensor(ids[None]), past_key_values=cache, use_cache=True)
                logits_D: NDArray[np.float32] = found.logits[0].cpu().numpy()
            return logits_D

        room = new_tokens(sampling, len(prompt_ids), self._limits.positions)
        # Copy the ids, because the generator runs later, when the caller may have changed the array.
        return generate_tokens(next_logits, prompt_ids.copy(), sampling, room)

    def _token_losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the losses [V, L] of a checked batch, computed in parts of at most `max_tokens`."""
        found_VL = np.empty((len(values_VK), int(batch.target_BT.sum())), np.float32)
        rest_VL = found_VL
        with self._lock, torch.no_grad():
            for rows in self._parts(batch, len(values_VK)):
                part_VL, rest_VL = np.split(rest_VL, [len(rows.target_L)], axis=1)
                for groups, state in self._states(values_VK, rows):
                    losses_GL = self._losses_of(rows, state).cpu().numpy()
                    for variants, losses_L in zip(groups, losses_GL, strict=True):
                        part_VL[variants] = losses_L
            self._model.clear_values()
        return found_VL

    def _states(self, values_VK: NDArray[np.float32], rows: _Rows) -> Iterator[tuple[Groups, Tensor]]:
        """Yield groups of variants with the same values, and the state of each group after the last layer."""
        run = _VariantsPass(self._model, self._counts, rows.ids_BT)
        entering = run.through(first_masked(self._spans))
        room = max(1, self._max_tokens // rows.ids_BT.numel())
        yield from run_variants(run, values_VK, self._spans, entering, room=room)
        self._layer_passes += run.layer_passes

    def _parts(self, batch: Batch, variants: int) -> Iterator[_Rows]:
        """Yield the rows with targets, as many at a time as `max_tokens` allows."""
        row_B = np.flatnonzero(batch.target_BT.any(axis=1))
        before_B = np.cumsum(batch.target_BT.sum(axis=1)) - batch.target_BT.sum(axis=1)
        # Take at least one row, however long it is.
        count = max(1, self._max_tokens // (variants * batch.input_ids_BT.shape[1]))
        for first in range(0, len(row_B), count):
            rows = row_B[first : first + count]
            row_L, column_L = np.nonzero(batch.target_BT[rows])
            # Attention is causal, so later tokens change no loss.
            width, start = int(column_L.max()), int(before_B[rows[0]])
            soft = None if batch.soft is None else batch.soft.rows(slice(start, start + len(row_L)))
            yield _Rows(
                ids_BT=self._tensor(batch.input_ids_BT[rows, :width]),
                place_L=self._tensor(row_L * width + column_L - 1),
                target_L=self._tensor(batch.input_ids_BT[rows][row_L, column_L]),
                soft=soft,
            )

    def _losses_of(self, rows: _Rows, state_GBTH: Tensor) -> Tensor:
        """Return the loss of each target, [G, L]: `-log p(token | earlier tokens)`, or `divergence`."""
        groups = len(state_GBTH)
        logits_SD = self._model.logits(state_GBTH.flatten(1, 2)[:, rows.place_L].flatten(0, 1))
        if rows.soft is None:
            losses_S = functional.cross_entropy(logits_SD, rows.target_L.repeat(groups), reduction="none")
        else:
            soft = rows.soft.repeated(groups)
            losses_S = divergence(logits_SD, self._tensor(soft.ids_RN), self._tensor(soft.probability_RN))
        return losses_S.view(groups, -1)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return as_tensor(array, self._device)


class _VariantsPass:
    """A `DecoderPass` (see `permille.engines.variants`) of some rows. States are [G, B, T, H]."""

    def __init__(self, model: CodedModel, counts: tuple[int, ...], ids_BT: Tensor) -> None:
        entered_BTH, self._arguments = model.enter(ids_BT)
        self._entered, self.layer_passes = entered_BTH[None], 0
        self._model, self._counts = model, counts

    def through(self, layers: int) -> Tensor:
        """Return the state after the lowest `layers` layers."""
        state = self._entered
        for number in range(layers):
            state = self.run_layer(number, state)
        return state

    def keep(self, state: Tensor) -> Tensor:
        return state

    def fork(self, state: Tensor, source_G: list[int], values_GK: NDArray[np.float32]) -> Tensor:
        self._model.set_values(as_tensor(values_GK, state.device), self._counts)
        # Indexing with a list copies, so the kept state does not change.
        return state[source_G]

    def run_layer(self, number: int, state: Tensor) -> Tensor:
        self.layer_passes += len(state) * state.shape[1]
        found: Tensor = self._model.layers[number](state.flatten(0, 1), **self._arguments[number])
        return found.view(state.shape)


def divergence(logits_LD: Tensor, ids_LN: Tensor, p_LN: Tensor) -> Tensor:
    """Return `sum_i p_i log(p_i / q_i)`, [L], where p is the soft target and q is the softmax of the logits.

    All tokens that are not in `ids_LN` together count as one token.
    """
    log_q_LN = functional.log_softmax(logits_LD, dim=1).gather(1, ids_LN)
    named_L = (torch.xlogy(p_LN, p_LN) - p_LN * log_q_LN).sum(dim=1)
    rest_L = (1 - p_LN.sum(dim=1)).clamp(min=_LEAST_REST)
    rest_q_L = (1 - log_q_LN.exp().sum(dim=1)).clamp(min=_LEAST_REST)
    return named_L + rest_L * torch.log(rest_L / rest_q_L)


def torch_device(name: str) -> torch.device:
    """Return the device of this name.

    Raises:
        InputError: the name is not cpu, cuda or cuda:<index>.
        OperatorError: the device does not exist.
    """
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]?))?", name):
        raise InputError(f"The device must be cpu, cuda or cuda:<index>, not {name!r}.")
    device = torch.device(name)
    found = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= found:
        raise OperatorError(
            f"There is no CUDA device {name!r}: torch {torch.__version__} finds {found}. Use the device cpu."
        )
    return device
