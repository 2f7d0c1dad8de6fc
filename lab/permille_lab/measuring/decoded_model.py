"""A package as a model of transformers in float32. Tests compare engines with it.

Every linear that a mask may cover becomes a `MaskedLinear` or an `AdaptedLinear`. Their parameter `values`
holds the trained numbers. Everything else is code of transformers with the decoded tensors. A package cannot
bring code: its model family must be one of our list, which transformers implements.
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
    """`y = x W^T + b` with `W[mask] = values`: the values replace the decoded codes (ADR 12)."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, indices: Tensor) -> None:
        """Store the weight and the flat indices of its mask, int64 [C].

        `values`, float32 [C], is a parameter, so that `functional_call` can replace it.
        """
        super().__init__()
        self.weight = nn.Parameter(weight_NK, requires_grad=False)
        self.bias = None if bias_N is None else nn.Parameter(bias_N, requires_grad=False)
        self.values = nn.Parameter(torch.zeros(indices.shape), requires_grad=False)
        self.register_buffer("row_C", indices // weight_NK.shape[1], persistent=False)
        self.register_buffer("column_C", indices % weight_NK.shape[1], persistent=False)
        self.row_C: Tensor
        self.column_C: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the product for x [..., K], [..., N]."""
        weight_NK = self.weight.index_put((self.row_C, self.column_C), self.values)
        return functional.linear(x, weight_NK, self.bias)


class AdaptedLinear(nn.Module):
    """`y = x W^T + b + scale (x A^T) B^T` (FORMAT 4.10).

    `values` holds B, or for LoRA first A and then B.
    """

    def __init__(self, linear: nn.Linear, adapter: AdapterInfo, a_RK: Tensor, count: int) -> None:
        """Store the linear and A. `count` is the number of values, 0 if the linear has no adapter.

        `values` is a parameter, so that `functional_call` can replace it.
        """
        super().__init__()
        self.linear = linear
        self.values = nn.Parameter(torch.zeros(count), requires_grad=False)
        self.register_buffer("a_RK", a_RK, persistent=False)
        self.a_RK: Tensor
        self._adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x [..., K], [..., N]."""
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
    """A causal language model of transformers.

    Attributes:
        value_names: names of the parameters `values` of all trained linears, in the order of the package.
        vocabulary: number of token ids.
        positions: largest number of positions, None if there is no limit.
    """

    module: nn.Module
    value_names: tuple[str, ...]
    vocabulary: int
    positions: int | None


def load_decoded_model(package: Package) -> DecodedModel:
    """Decode the package's weights and build its model.

    Raises:
        InputError: `transformers_config` refuses the config.
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
    """Return all tensors in float32. Quantized ones are decoded."""
    plain = {name: torch.from_numpy(package.plain(name).float32().copy()) for name in package.plain_names}
    names = [info.name for info in package.manifest.tensors]
    return plain | {name: torch.from_numpy(dequantize(package.quantized(name))) for name in names}


def _trained_layer(model: Any, package: Package, info: TensorInfo) -> str:
    """Replace a linear by one with values. Return the name of the values."""
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
