"""From a package to a model that runs: the architecture of transformers, the tensors of the package.

The model is built on the meta device, so that nothing is allocated or initialised; then quantized layers
become `OverlayLinear`, and the others get the package's tensors. Embeddings and head keep the dtype and the
memory map of the package (they are widened by what is looked up or multiplied); norms and biases are
converted to the compute dtype. Buffers that no checkpoint holds (rotary frequencies) are computed by
transformers' own code.

No code of a package runs: the config's family is on our list, and transformers has the code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from permille.engines.dequantization import PackedWeight, borrow
from permille.engines.head import OutputHead
from permille.engines.inputs import ModelLimits
from permille.engines.layer_stack import LayerStack
from permille.engines.overlay import Overlay, OverlayLinear
from permille.engines.row_threads import RowThreads
from permille.engines.sharing import layer_spans
from permille.engines.thrift import make_thrifty
from permille.errors import InputError, PackageError
from permille.models.families import family_of
from permille.package.reader import Package
from permille.tensors import RawTensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledModel:
    """A package, ready to run.

    Attributes:
        decoder: from input embeddings to the hidden states that the head reads.
        stack: the decoder's layers, whose order of work it decides.
        spans: where each layer's masked weights lie in the values.
        embed: the module that looks tokens up; `embedding_DH` is its weight as stored.
    """

    decoder: nn.Module
    stack: LayerStack
    spans: tuple[tuple[int, int], ...]
    embed: nn.Module
    embedding_DH: Tensor
    head: OutputHead
    overlay: Overlay
    limits: ModelLimits
    config: Any


def assemble(package: Package, overlay: Overlay, *, cache_bytes: int) -> AssembledModel:
    """Build the model of a package.

    Args:
        overlay: its layers share it; it decides device and dtype.
        cache_bytes: dequantized weights are kept, in the model's order, as far as they fit.

    Raises:
        InputError: a family that we do not know, attention that is not causal, or frequencies that depend on
            the longest sequence of a call.
        PackageError: the package lacks a tensor of its config's model, or has another one.
    """
    if package.config.get("use_bidirectional_attention"):
        raise InputError("expected a causal language model, got one with use_bidirectional_attention")
    if "longrope" in _rope_types(package.config):
        # transformers chooses its factors by the largest position of a call, and we pack sequences of many
        # lengths into one.
        raise InputError("expected a rope type whose frequencies are those of every length, got 'longrope'")
    model = _empty_model(package.config)
    _compute_buffers(model, overlay.device)
    _place_overlays(model, package, overlay, cache_bytes)
    _place_plain(model, package, overlay.device, overlay.dtype)
    names = [info.name for info in package.manifest.tensors]
    layers = model.get_submodule(names[0].partition(".layers.")[0] + ".layers")
    make_thrifty(layers, overlay)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    embed.padding_idx = None  # It only matters for gradients, and the engine looks up in a part of the table.
    return AssembledModel(
        decoder=model.base_model,
        stack=LayerStack(layers, model.config),
        spans=layer_spans(names, package.counts, len(layers)),
        embed=embed,
        embedding_DH=embed.weight,
        head=OutputHead(head.weight, getattr(model.config, "final_logit_softcapping", None)),
        overlay=overlay,
        limits=ModelLimits(
            k=package.k,
            vocabulary=len(embed.weight),
            positions=getattr(model.config, "max_position_embeddings", None),
        ),
        config=model.config,
    )


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """Named in the config, for all layers or by type of layer."""
    tables = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    given = [table for table in tables if isinstance(table, Mapping)]
    given += [part for table in given for part in table.values() if isinstance(part, Mapping)]
    return {str(table.get(key)) for table in given for key in ("rope_type", "type")}


def _empty_model(config: dict[str, Any]) -> Any:
    """The model on the meta device: shapes alone."""
    entries = {name: value for name, value in config.items() if name != "dtype"}
    typed = CONFIG_MAPPING[family_of(config).value].from_dict(entries)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            typed, dtype=torch.float32, attn_implementation=None, trust_remote_code=False
        )
    return model.eval().requires_grad_(False)


def _compute_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers on a CPU, as transformers does, then move them; other modules are left alone."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if buffers:
            model._init_weights(module)
        for name in buffers:
            setattr(module, name, getattr(module, name).to(device))


def _place_overlays(model: Any, package: Package, overlay: Overlay, cache_bytes: int) -> None:
    start = 0
    threads = RowThreads(torch.get_num_threads())
    for info in package.manifest.tensors:
        weight = PackedWeight(package.quantized(info.name), overlay.device, threads)
        cache_bytes -= weight.buffer_size * overlay.dtype.itemsize
        indices = package.mask(info.name)
        layer = OverlayLinear(overlay, weight, indices, start, cached=cache_bytes >= 0)
        path = info.name.removesuffix(".weight")
        linear = model.get_submodule(path)
        _check_shape(info.name, (linear.out_features, linear.in_features), info.shape)
        layer.bias = linear.bias
        model.set_submodule(path, layer)
        start += len(indices)


def _place_plain(model: Any, package: Package, device: torch.device, dtype: torch.dtype) -> None:
    """Give each remaining parameter its tensor, tied ones the same; refuse what is missing or left over."""
    kept = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    waiting = set(package.plain_names)
    # Empty parameter and its replacement, by identity: tied modules share one.
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, empty in list(module.named_parameters(recurse=False)):
            name = f"{path}.{leaf}"
            if name in waiting:
                tensor = as_tensor(package.plain(name))
                _check_shape(name, tuple(empty.shape), tuple(tensor.shape))
                tensor = tensor.to(device) if id(module) in kept else tensor.to(device, dtype)
                placed[empty] = nn.Parameter(tensor, requires_grad=False)
                waiting.discard(name)
            elif empty not in placed:
                raise PackageError("tensor-names", f"expected a tensor {name!r}, got none")
            setattr(module, leaf, placed[empty])
    if waiting:
        raise PackageError("tensor-names", f"expected no tensor {min(waiting)!r} in this model")


def as_tensor(raw: RawTensor) -> Tensor:
    """The package's bytes as a tensor over the same memory, in the stored dtype."""
    return borrow(raw.data).view(_DTYPES[raw.dtype]).view(raw.shape)


def _check_shape(name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    if expected != got:
        raise PackageError("tensor-shape", f"expected {name!r} of shape {expected}, got {got}")
