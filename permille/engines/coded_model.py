"""A package as a model of transformers whose linear layers, embedding and head keep their codes.

transformers builds the model from a config of a known family, on torch's device "meta", without memory. Then
each quantized linear becomes a `CodedLinear`, embedding and head become tables, and each decoder layer
recomputes its activations in the reverse pass. All other modules remain those of transformers. Code that
comes with a package is never run.

Shapes: B sequences, T tokens, L states after the last layer, H hidden size, D size of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from permille.engines.coded_layers import (
    CodedEmbedding,
    CodedHead,
    CodedLinear,
    CodedTable,
    CodedWeight,
    LowRank,
    SparseAdd,
    as_tensor,
)
from permille.errors import InputError
from permille.models.architecture import architecture_of
from permille.models.families import is_tied, shape_of, table_names
from permille.models.layerwise import restore_buffers, transformers_config
from permille.package.manifest import TensorInfo
from permille.package.reader import Package

Arguments = dict[str, Any]


class CodedLayer(nn.Module):
    """A decoder layer that keeps only its input for the reverse pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.stand_in: Callable[[Tensor, Arguments], Tensor] | None = None
        """A function that is called instead of the layer, or None."""

    def forward(self, hidden: Tensor, **arguments: Any) -> Any:
        """Run the layer, or its stand-in."""
        if self.stand_in is not None:
            return self.stand_in(hidden, arguments)
        if not torch.is_grad_enabled():
            return self.layer(hidden, **arguments)
        # Do not use the reentrant form. If the input of a layer needs no gradient (as in the first layer),
        # that form gives none for the values either. Dropout is off, so there is no random state to preserve.
        return checkpoint(self.layer, hidden, use_reentrant=False, preserve_rng_state=False, **arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedModel:
    """A causal language model of transformers.

    Text generation calls `module` as a whole. For losses, an engine calls the parts of the model one by one,
    because variants share some layers: `enter`, then the layers, then `logits`.

    Attributes:
        module: the whole model.
        layers: the decoder layers.
        linears: the quantized layers, in the order of the package.
        head: computes logits at the selected positions.
        vocabulary: the number of tokens.
        positions: the length of the longest sequence, or None without a limit.
    """

    module: Any
    layers: tuple[CodedLayer, ...]
    linears: tuple[CodedLinear, ...]
    head: CodedHead
    vocabulary: int
    positions: int | None

    def set_values(self, values_VK: Tensor, counts: tuple[int, ...]) -> None:
        """Give each layer its part of the values."""
        for linear, values_VC in zip(self.linears, torch.split(values_VK, list(counts), dim=1), strict=True):
            linear.values_VC = values_VC

    def clear_values(self) -> None:
        """Drop the values of the last call, and what autograd keeps for them."""
        for linear in self.linears:
            linear.values_VC = torch.empty(1, 0)

    def enter(self, ids_BT: Tensor) -> tuple[Tensor, list[Arguments]]:
        """Return the input of the first layer, [B, T, H], and the other arguments of each layer."""
        # transformers computes embeddings, mask and positions. `note` takes the place of each layer, and
        # records what the layer would get.
        entered: list[Tensor] = []
        arguments: list[Arguments] = []

        def note(hidden: Tensor, given: Arguments) -> Tensor:
            # The causal mask is the same for all rows. Keep one row, which broadcasts to any number of rows.
            mask = given.get("attention_mask")
            entered.append(hidden)
            arguments.append(given if mask is None else given | {"attention_mask": mask[:1]})
            return hidden

        self._around(self.module.base_model, ids_BT, note)
        return entered[0], arguments

    def logits(self, state_LH: Tensor) -> Tensor:
        """Return the float32 logits [L, D] of states after the last layer."""
        self.head.place_L = slice(None)
        # The ids do not matter: the stand-ins ignore their input and return the states.
        any_ids = torch.zeros(1, 1, dtype=torch.int64, device=state_LH.device)
        logits: Tensor = self._around(self.module, any_ids, lambda *_: state_LH[None]).logits
        return logits

    def _around(self, module: Any, ids_BT: Tensor, stand_in: Callable[[Tensor, Arguments], Tensor]) -> Any:
        """Run what transformers does before and after the decoder layers, with `stand_in` for each layer."""
        for layer in self.layers:
            layer.stand_in = stand_in
        try:
            return module(ids_BT, use_cache=False)
        finally:
            for layer in self.layers:
                layer.stand_in = None


def load_coded_model(package: Package, device: torch.device, dtype: torch.dtype) -> CodedModel:
    """Copy the codes of a package to the device, and build its model around them.

    Raises:
        InputError: the family is unknown, or its attention is not causal.
    """
    config = transformers_config(package.config)
    # "sdpa" (torch's own attention) silently ignores a soft cap of the scores, so Gemma 2 needs "eager".
    attention = "sdpa" if getattr(config, "attn_logit_softcapping", None) is None else "eager"
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.eval().requires_grad_(False)
    # Compute the buffers, such as rotary frequencies. No package holds them, and on "meta" they have no
    # numbers.
    restore_buffers(model, device)
    # Keep the order of the package, in which `set_values` divides the values among the layers.
    linears = tuple(_linear(model, package, info, device, dtype) for info in package.manifest.tensors)
    # Replace the tables before `_fill`, which loads all parameters that remain.
    head = _tables(model, package, device, dtype)
    _fill(model, package, device, dtype)
    # Wrap the layers last, because this inserts `.layer` into the names of their weights.
    prefix = shape_of(package.config).about.prefix
    layers = tuple(map(CodedLayer, model.get_submodule(prefix)))
    model.set_submodule(prefix, nn.ModuleList(layers))
    return CodedModel(
        module=model,
        layers=layers,
        linears=linears,
        head=head,
        vocabulary=head.table.shape[0],
        positions=_positions(package, getattr(config, "max_position_embeddings", None)),
    )


def _positions(package: Package, most: int | None) -> int | None:
    """Return the length of the longest sequence, or None without a limit.

    The limit can be below `most`, because some rotary embeddings are valid only up to a length
    (`permille.models.rope`).
    """
    try:
        return architecture_of(package.config).positions
    except InputError:  # transformers supports this model, but `permille.models.architecture` does not
        return most


def _linear(
    model: Any, package: Package, info: TensorInfo, device: torch.device, dtype: torch.dtype
) -> CodedLinear:
    """Replace a linear layer by one with codes."""
    path, adapter = info.name.removesuffix(".weight"), package.manifest.adapter
    weight = CodedWeight(package.quantized(info.name), device, dtype)
    added: SparseAdd | LowRank | None = None
    if info.count and adapter is not None:
        added = LowRank(adapter, package.adapter_matrix(info.name), device)
    elif info.count:
        added = SparseAdd(weight, package.mask(info.name))
    bias_N = None
    if model.get_submodule(path).bias is not None:
        bias_N = _plain(package, f"{path}.bias", device, dtype)
    linear = CodedLinear(weight, bias_N, added)
    model.set_submodule(path, linear)
    return linear


def _tables(model: Any, package: Package, device: torch.device, dtype: torch.dtype) -> CodedHead:
    """Replace embedding and head by tables, and return the head. Tied weights share one table."""
    embedding, head = table_names(package.config)
    table = CodedTable(package.plain(embedding), device)
    own = table if is_tied(package.config) else CodedTable(package.plain(head), device)
    # Some families multiply by a factor inside the embedding module. That module is replaced here, so pass
    # the factor on. Other families scale after the module.
    factor = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    model.set_input_embeddings(CodedEmbedding(table, factor, dtype))
    found = CodedHead(own)
    model.set_output_embeddings(found)
    return found


def _fill(model: Any, package: Package, device: torch.device, dtype: torch.dtype) -> None:
    """Load the tensors without codes: norms, biases, learned positions."""
    for name, _ in list(model.named_parameters()):
        path, _, last = name.rpartition(".")
        parameter = nn.Parameter(_plain(package, name, device, dtype), requires_grad=False)
        setattr(model.get_submodule(path), last, parameter)


def _plain(package: Package, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    return as_tensor(package.plain(name).float32(), device).to(dtype)
