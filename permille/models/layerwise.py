"""A checkpoint that runs one decoder layer at a time, so that a model can be larger than memory.

    stream = LayerStream(checkpoint)
    with stream.ends() as ends:                      # embedding, last norm and head are in memory
        hidden = [ends.embed(tokens_BT) for tokens_BT in batches]
    for index in range(stream.layers):
        with stream.layer(index) as layer:           # this decoder layer alone is in memory
            hidden = [layer(hidden_BTH) for hidden_BTH in hidden]
    with stream.ends() as ends:
        logits = [ends.logits(hidden_BTH) for hidden_BTH in hidden]

The model is that of transformers, in eval mode. It is built on torch's device "meta", without memory. In the
model, recorders replace the decoder layers. A recorder stores the arguments that the model passes to a layer
(masks, rotations), so this module needs no code for single families. These arguments depend only on the
shape of the input, so the real layer is later called with the stored ones.

If gradients are enabled, `layer` and `logits` are differentiable with respect to the hidden states, and to
parameters on which the caller sets `requires_grad_()`. This module holds the hidden states of the last run,
so their autograd graph lives until the next run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import family_of, shape_of
from permille.models.loading import load_model


class LayerStream:
    """A model of which only the part in use is in memory."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Build the model without weights. Its parts compute in `dtype` on `device`."""
        self.checkpoint = checkpoint
        self.dtype, self._device = dtype, torch.device(device)
        self._prefix = shape_of(checkpoint.config).about.prefix
        self._model = _meta_model(checkpoint, dtype)
        layers = self._model.get_submodule(self._prefix)
        if not isinstance(layers, nn.ModuleList):
            raise InputError(f"The model has no list of decoder layers at {self._prefix}.")
        self._layers = list(layers)
        self._recorders = [_Recorder() for _ in self._layers]
        # Recorders have no parameters, so filling the model loads only its ends.
        self._model.set_submodule(self._prefix, nn.ModuleList(self._recorders))
        restore_buffers(self._model, self._device)
        # The arguments of each layer, by the shape of the input. They depend on nothing else.
        self._inputs: dict[tuple[int, int], tuple[Mapping[str, Any], ...]] = {}

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    @contextmanager
    def ends(self) -> Iterator["Ends"]:
        """Load the parts before and after the decoder layers, and free them at the end."""
        self._fill(self._model, "")
        # Filling replaced the parameters, so a tied head must point to the new embedding.
        self._model.tie_weights()
        try:
            yield Ends(self)
        finally:
            _empty(self._model)

    @contextmanager
    def layer(self, index: int) -> Iterator["DecoderLayer"]:
        """Load one decoder layer, and free it at the end."""
        module, prefix = self._layers[index], f"{self._prefix}.{index}"
        self._fill(module, f"{prefix}.")
        try:
            yield DecoderLayer(stream=self, index=index, module=module, prefix=prefix)
        finally:
            _empty(module)

    def _run(self, tokens_BT: Tensor, replaced: Tensor | None = None) -> Tensor:
        """Run the model with recorders in place of layers. The first recorder returns `replaced`, if set.

        Without `replaced`, the caller needs only the recorded hidden states, so the model computes only the
        logits of the last token.
        """
        self._recorders[0].replaced = replaced
        # `logits_to_keep=0` keeps the logits of all tokens.
        kept = 1 if replaced is None else 0
        try:
            found: Tensor = self._model(
                input_ids=tokens_BT.to(self._device), use_cache=False, logits_to_keep=kept
            ).logits
        finally:
            self._recorders[0].replaced = None
        shape = (tokens_BT.shape[0], tokens_BT.shape[1])
        self._inputs[shape] = tuple(each.keywords for each in self._recorders)
        return found

    def _keywords(self, index: int, hidden_BTH: Tensor) -> Mapping[str, Any]:
        shape = (hidden_BTH.shape[0], hidden_BTH.shape[1])
        # A caller may run a layer on a shape that was never embedded. Embed zeros to record the arguments.
        if shape not in self._inputs:
            with self.ends() as ends, torch.no_grad():
                ends.embed(torch.zeros(shape, dtype=torch.long))
        return self._inputs[shape][index]

    def _fill(self, module: nn.Module, prefix: str) -> None:
        _fill(module, prefix, self.checkpoint, self._device, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A decoder layer in memory. A parameter's full name is `prefix`, a dot, and its name in `module`."""

    stream: LayerStream
    index: int
    module: nn.Module
    prefix: str

    def __call__(self, hidden_BTH: Tensor) -> Tensor:
        """Return the hidden states after this layer."""
        keywords = self.stream._keywords(self.index, hidden_BTH)
        found: Tensor = self.module(hidden_BTH.to(self.stream._device), **keywords)
        return found


class Ends:
    """The parts of the model before and after the decoder layers, in memory."""

    def __init__(self, stream: LayerStream) -> None:
        self._stream = stream

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the hidden states before the first decoder layer."""
        self._stream._run(tokens_BT)
        return self._stream._recorders[0].hidden

    def logits(self, hidden_BTH: Tensor) -> Tensor:
        """Return the logits of the hidden states after the last decoder layer."""
        # Only the shape of the tokens counts, because the first recorder returns `hidden_BTH` in place of
        # their embeddings.
        tokens_BT = torch.zeros(hidden_BTH.shape[:2], dtype=torch.long)
        return self._stream._run(tokens_BT, hidden_BTH.to(self._stream._device))


class _Recorder(nn.Module):
    """A stand-in for a decoder layer. It records its inputs, and returns the hidden states or `replaced`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)
        self.keywords: Mapping[str, Any] = {}
        self.replaced: Tensor | None = None

    def forward(self, hidden_BTH: Tensor, **keywords: Any) -> Tensor:
        self.hidden, self.keywords = hidden_BTH, keywords
        return hidden_BTH if self.replaced is None else self.replaced


def transformers_config(config: Mapping[str, Any]) -> Any:
    """Return a config object of transformers for a `config.json` of a known family.

    Raises:
        InputError: the family is unknown, or its attention is not causal.
    """
    from transformers import AutoConfig

    if config.get("use_bidirectional_attention"):
        raise InputError(
            "The model reads in both directions (use_bidirectional_attention), so it cannot generate text."
        )
    entries = {key: value for key, value in config.items() if key not in ("model_type", "dtype")}
    return AutoConfig.for_model(family_of(config).value, **entries)


def _meta_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**checkpoint.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return model.eval().requires_grad_(False)


def restore_buffers(model: Any, device: torch.device) -> None:
    """Compute buffers that depend on the config alone, such as frequencies. Checkpoints do not have them."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            # `_init_weights` below writes into the buffers, so they need memory first.
            setattr(module, name, torch.empty_like(buffer, device=device))
        if buffers:
            model._init_weights(module)  # as `from_pretrained` does it


def whole_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Any:
    """Return the model of transformers with all weights in memory.

    If the folder has no weights, fill the model with the checkpoint's tensors, one at a time. Weights,
    buffers and losses have the same bits in both ways.

    Raises:
        InputError: as for `load_model`.
    """
    if checkpoint.has_weights:
        return load_model(checkpoint.folder, dtype, device=str(device))
    device = torch.device(device)
    model = _meta_model(checkpoint, dtype)
    restore_buffers(model, device)
    _fill(model, "", checkpoint, device, dtype)
    model.tie_weights()
    return model


def _fill(
    module: nn.Module, prefix: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> None:
    for name, _ in list(module.named_parameters()):
        if prefix + name not in checkpoint.names:
            continue  # a tied head
        # `torch.tensor` copies, so the pages of a mapped file can be released.
        weight = torch.tensor(checkpoint.float32(f"{prefix}{name}"))
        _put(module, name, weight.to(device, dtype))


def _put(module: nn.Module, name: str, weight: Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, nn.Parameter(weight, requires_grad=False))


def _empty(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters()):
        # A parameter on "meta" has a shape, but no memory.
        _put(module, name, torch.empty_like(parameter, device="meta"))
