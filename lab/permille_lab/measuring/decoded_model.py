"""A package as a model of transformers in float32, to compare engines with.

Masked weights, or numbers of an adapter, are parameters of their own: every linear layer that a mask may
cover becomes a `MaskedLinear` or an `AdaptedLinear`. Everything else is transformers' own code on the decoded
tensors. No code of a package runs: its family is on our list, and transformers has the code.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from permille.choices import AdapterKind
from permille.models.layerwise import transformers_config
from permille.package.manifest import AdapterInfo, TensorInfo
from permille.package.reader import Package
from permille.quantization import dequantize


class MaskedLinear(nn.Module):
    """`y = x W^T + b` with `W[mask] = values`: sparse values replace what the codes decode to (ADR 12)."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, indices: Tensor) -> None:
        """`indices` are flat, int64 [c]; `values` [c] float32 is what `functional_call` replaces."""
        super().__init__()
        self.weight = nn.Parameter(weight_NK, requires_grad=False)
        self.bias = None if bias_N is None else nn.Parameter(bias_N, requires_grad=False)
        self.values = nn.Parameter(torch.zeros(indices.shape), requires_grad=False)
        self.register_buffer("row_C", indices // weight_NK.shape[1], persistent=False)
        self.register_buffer("column_C", indices % weight_NK.shape[1], persistent=False)
        self.row_C: Tensor
        self.column_C: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N]."""
        weight_NK = self.weight.index_put((self.row_C, self.column_C), self.values)
        return functional.linear(x, weight_NK, self.bias)


class AdaptedLinear(nn.Module):
    """`y = x W^T + b + scale (x A^T) B^T` (FORMAT 4.10); `values` begin with A where it is trained."""

    def __init__(self, linear: nn.Linear, adapter: AdapterInfo, a_RK: Tensor, count: int) -> None:
        """`count` values, 0 where nothing stands beside the linear; `functional_call` replaces them."""
        super().__init__()
        self.linear = linear
        self.values = nn.Parameter(torch.zeros(count), requires_grad=False)
        self.register_buffer("a_RK", a_RK, persistent=False)
        self.a_RK: Tensor
        self._adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N]."""
        y: Tensor = self.linear(x)
        if not len(self.values):
            return y
        a_RK: Tensor = self.a_RK
        b_N: Tensor = self.values
        if self._adapter.kind is AdapterKind.LORA:
            a_RK, b_N = self.values[: a_RK.numel()].view_as(a_RK), self.values[a_RK.numel() :]
        added = functional.linear(functional.linear(x, a_RK), b_N.view(-1, self._adapter.rank))
        return y + self._adapter.scale * added


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedModel:
    """A causal language model of transformers; `value_names` are its trained layers' `values`, in the
    package's order."""

    module: nn.Module
    value_names: tuple[str, ...]
    vocabulary: int
    positions: int | None


def load_decoded_model(package: Package) -> DecodedModel:
    """Decode the package's weights once and build its model.

    Raises:
        InputError: as `transformers_config`.
    """
    config = transformers_config(package.config)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None, config=config, state_dict=_state(package), dtype=torch.float32, attn_implementation="eager"
        )
    finally:
        if shown:
            logging.enable_progress_bar()
    model.requires_grad_(False)
    return DecodedModel(
        module=model,
        value_names=tuple(_trained_layer(model, package, info) for info in package.manifest.tensors),
        vocabulary=model.get_input_embeddings().weight.shape[0],
        positions=getattr(config, "max_position_embeddings", None),
    )


def _state(package: Package) -> dict[str, Tensor]:
    """Return all tensors in float32, with quantized layers decoded."""
    plain = {name: torch.from_numpy(package.plain(name).float32().copy()) for name in package.plain_names}
    names = [info.name for info in package.manifest.tensors]
    return plain | {name: torch.from_numpy(dequantize(package.quantized(name))) for name in names}


def _trained_layer(model: Any, package: Package, info: TensorInfo) -> str:
    """Put a layer with values in the place of a linear one; returns their name."""
    path, adapter = info.name.removesuffix(".weight"), package.manifest.adapter
    linear = model.get_submodule(path)
    if adapter is not None:
        a_RK = package.adapter_matrix(info.name) if info.count else np.empty((0, 0), np.float32)
        frozen = torch.from_numpy(np.array(a_RK))
        model.set_submodule(path, AdaptedLinear(linear, adapter, frozen, info.count))
        return f"{path}.values"
    bias_N = None if linear.bias is None else linear.bias.data
    flat = torch.from_numpy(package.mask(info.name).astype(np.int64))
    model.set_submodule(path, MaskedLinear(linear.weight.data, bias_N, flat))
    return f"{path}.values"
