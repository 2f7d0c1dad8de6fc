"""A flat vector of trained numbers for every method: masked weights, all weights, adapters or a prefix.

A `Trainable` wraps a transformers model and overwrites its parameters. It is a `LossEngine`, so estimators of
`permille.zo` train all these sets with the same code. It also has a gradient, for first-order references
and for scores on task data. It is meant for experiments with small models: variants run one after another.

Adapters and prefixes come from peft.

# Legend: K trained numbers, V variants, B sequences, T tokens, R targets, C columns, D vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from permille.errors import InputError
from permille.zo.estimators import Batch
from permille_lab.models.forward_rows import (
    PACKABLE,
    RowPart,
    can_pack,
    packed_parts,
    padded_parts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX_TOKENS = 5
PACKED_TOKENS = 256
"""Largest number of packed tokens in one pass.

Attention is computed for all pairs of tokens, so its cost grows with this number. Products are not faster
with more tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Entries of one parameter: those at the flat positions `index`, or all if it is None."""

    parameter: Tensor
    index: Tensor | None

    @property
    def size(self) -> int:
        return self.parameter.numel() if self.index is None else self.index.numel()

    def read(self) -> Tensor:
        flat = self.parameter.detach().reshape(-1)
        return (flat if self.index is None else flat[self.index]).float()

    def write(self, values: Tensor) -> None:
        flat = self.parameter.detach().view(-1)
        if self.index is None:
            flat.copy_(values)
        else:
            flat[self.index] = values.to(flat.dtype)

    def gradient(self) -> Tensor:
        grad = self.parameter.grad
        if grad is None:
            return torch.zeros(self.size)
        flat = grad.reshape(-1)
        return (flat if self.index is None else flat[self.index]).float()


class Trainable:
    """A model and its trained numbers as one vector, as the module describes.

    It is not safe for several threads, since each call overwrites the model's parameters.

    Attributes:
        k: number of trained numbers.
        base_K: their values before training, float32 [K].
    """

    def __init__(
        self, model: Any, parts: Sequence[_Part], *, max_tokens: int = 8192, packs: bool = True
    ) -> None:
        """Freeze the model and read the trained numbers.

        Args:
            model: a causal language model of transformers. It is called with `input_ids`, `logits_to_keep`
                (columns), and `attention_mask` or `position_ids`. Its `.logits` at a position must depend
                only on the input of its `get_output_embeddings()` there.
            parts: the trained entries. No parameter may occur twice.
            max_tokens: largest number of tokens of a forward pass of padded rows, padding included.
            packs: if True, rows are packed if the family allows it (`forward_rows.PACKABLE`).
        """
        self._model = model.eval().requires_grad_(False)
        self._head = model.get_output_embeddings()
        self._parts = list(parts)
        self._max_tokens = max_tokens
        self._packs = packs and model.config.model_type in PACKABLE
        sizes = [part.size for part in self._parts]
        self._ends = np.cumsum(sizes)
        self.k = int(sum(sizes))
        self.base_K: NDArray[np.float32] = (
            torch.cat([torch.zeros(0), *(part.read() for part in self._parts)]).cpu().numpy().copy()
        )
        """Values before training, float32 [K]."""

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return each variant's mean loss over the batch's targets, float32 [V]."""
        means = [self.token_losses(values_K, batch).mean(dtype=np.float64) for values_K in values_VK]
        return np.array(means, dtype=np.float32)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the loss of each target, float32 [R], in row-major order of the batch."""
        _check(batch)
        self._install(values_K)
        with torch.no_grad():
            logits_RD = torch.cat([self._part_logits(part) for part in self._split(batch)])
            losses = _cross_entropy(logits_RD, batch.input_ids_BT[batch.target_BT])
        result: NDArray[np.float32] = losses.float().cpu().numpy()
        return result

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        """Return the mean loss and its gradient, float32 [K]."""
        _check(batch)
        self._install(values_K)
        parameters = [part.parameter for part in self._parts]
        targets = int(batch.target_BT.sum())
        total = 0.0
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            for rows in self._split(batch):
                loss = _cross_entropy(self._part_logits(rows), rows.ids[rows.target]).sum() / targets
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            gradient_K = torch.cat([part.gradient() for part in self._parts])
        finally:
            for parameter in parameters:
                parameter.grad = None
                parameter.requires_grad_(False)
        result: NDArray[np.float32] = gradient_K.cpu().numpy()
        return total, result

    def _install(self, values_K: NDArray[np.float32]) -> None:
        if values_K.shape != (self.k,) or values_K.dtype != np.float32:
            raise InputError(
                f"expected values float32 [{self.k}], got {values_K.dtype} {list(values_K.shape)}"
            )
        start = 0
        for part, end in zip(self._parts, self._ends.tolist(), strict=True):
            part.write(torch.from_numpy(values_K[start:end]))
            start = end

    def _split(self, batch: Batch) -> list[RowPart]:
        if self._packs and can_pack(batch):
            return list(packed_parts(batch, PACKED_TOKENS))
        return list(padded_parts(batch, self._max_tokens))

    def _part_logits(self, part: RowPart) -> Tensor:
        """Return the logits that predict the targets, [R, D]. No others are computed.

        `logits_to_keep` selects columns for all rows. The hook then removes the rows without a target there.
        """
        columns = part.target[:, 1:].any(dim=0).nonzero()[:, 0]
        before_BC = part.target[:, 1:][:, columns]
        hook = self._head.register_forward_pre_hook(lambda _, inputs: (inputs[0][before_BC], *inputs[1:]))
        try:
            logits_RD: Tensor = self._model(
                input_ids=part.ids, use_cache=False, logits_to_keep=columns, **part.inputs
            ).logits
        finally:
            hook.remove()
        return logits_RD


def _check(batch: Batch) -> None:
    if batch.target_BT[:, 0].any():
        raise InputError("expected no target in the first column, since no token predicts it, got one")


def _cross_entropy(logits_RD: Tensor, ids_R: Tensor | NDArray[np.int64]) -> Tensor:
    return functional.cross_entropy(logits_RD.float(), torch.as_tensor(ids_R), reduction="none")


def masked_weights(model: "PreTrainedModel", mask: Mapping[str, NDArray[np.uint32]]) -> Trainable:
    """Train the weights of a mask. All other numbers are frozen.

    Raises:
        InputError: the mask has a tensor that the model does not have.
    """
    parameters = dict(model.named_parameters())
    if missing := [name for name in mask if name not in parameters]:
        raise InputError(f"expected masked tensors of the model, got {missing[0]!r}")
    parts = [
        _Part(parameter=parameters[name], index=torch.from_numpy(index.astype(np.int64)))
        for name, index in mask.items()
        if len(index)
    ]
    return Trainable(model, parts)


def parameters_of(model: "PreTrainedModel", parameters: Sequence[Tensor]) -> Trainable:
    """Train these parameters of the model."""
    return Trainable(model, _whole(parameters))


def all_weights(model: "PreTrainedModel") -> Trainable:
    """Train every parameter, as MeZO does. A tied parameter counts once."""
    return Trainable(model, _whole(model.parameters()))


def lora(model: "PreTrainedModel", rank: int, *, frozen_a: bool, seed: int) -> Trainable:
    """Train low-rank adapters on all linears of the decoder layers, with alpha = rank.

    `B` starts at 0, so at `base_K` the model computes the same as the base. The papers take alpha 16 with
    rank 8, so the same adapter changes the weights twice as much there. A search of the step size compensates
    for that, to first order only.

    Args:
        frozen_a: True for LoRA-FA, which trains only `B`.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    torch.manual_seed(seed)
    adapted = get_peft_model(model, config)
    return Trainable(adapted, _whole(_adapters(adapted, lambda name: not (frozen_a and "lora_A" in name))))


def prefix(
    model: "PreTrainedModel", tokens: int = PREFIX_TOKENS, *, real: bool = False, seed: int
) -> Trainable:
    """Train keys and values before the text, in every layer (prefix tuning without reparametrization).

    Args:
        tokens: number of positions of the prefix.
        real: if True, start at the keys and values of random tokens, else at random numbers.
    """
    from peft import PrefixTuningConfig, get_peft_model, initialize_kv_prefix_from_past_key_values

    torch.manual_seed(seed)
    config = PrefixTuningConfig(num_virtual_tokens=tokens, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    if real:
        ids_1T = torch.randint(0, int(model.config.vocab_size), (1, tokens))
        with torch.no_grad(), adapted.disable_adapter():
            cache = adapted(input_ids=ids_1T, use_cache=True).past_key_values
        initialize_kv_prefix_from_past_key_values(adapted, past_key_values=cache)
    return Trainable(adapted, _whole(_adapters(adapted, lambda _: True)), packs=False)


def _adapters(model: Any, wanted: Callable[[str], bool]) -> list[Tensor]:
    return [
        parameter for name, parameter in model.named_parameters() if parameter.requires_grad and wanted(name)
    ]


def _whole(parameters: Any) -> list[_Part]:
    return [_Part(parameter=parameter, index=None) for parameter in parameters]
