"""Perplexity of a torch model before and after a quantization of its weights.

    perplexity = exp(mean over all predictions of -log p(token | tokens before)), logits in float32

This module needs torch, so `permille.quantization` itself does not import it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from permille.errors import InputError
from permille.models.families import layer_of
from permille.models.layerwise import LayerStream
from permille.quantization import dequantize
from permille.quantization.types import QuantizedTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Perplexity(TypedDict):
    """Mean loss of `tokens` predictions in nats, and its exponential."""

    tokens: int
    loss: float
    perplexity: float


def perplexity(
    model: "PreTrainedModel",
    sequences_NT: NDArray[np.int64],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Measure a model on [N, T] token ids: N * (T - 1) predictions, whose losses are summed in float64.

    Raises:
        InputError: there is no prediction, or a loss is not finite (the message names the sequence).
    """
    _check(sequences_NT)
    total = 0.0
    # eval() turns dropout off. The caller's mode is restored.
    training = model.training
    model.eval()
    try:
        for index, tokens_T in enumerate(sequences_NT):
            with torch.inference_mode():
                ids_BT = _ids(tokens_T).to(model.device)
                total += _loss(model(input_ids=ids_BT, use_cache=False).logits, ids_BT, index)
            if progress is not None:
                progress(index + 1, len(sequences_NT))
    finally:
        model.train(training)
    return _mean(total, sequences_NT)


def perplexity_by_layer(
    stream: LayerStream,
    sequences_NT: NDArray[np.int64],
    *,
    quantized: Iterable[tuple[str, QuantizedTensor]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Measure a model with one decoder layer in memory at a time, beside the hidden states of all sequences.

    Args:
        stream: the model.
        sequences_NT: as in `perplexity`.
        quantized: weights whose decoded numbers replace the model's own, in tensor_id order.
        progress: called with the number of layers done.

    Raises:
        InputError: as for `perplexity` and `apply_quantized`.
    """
    _check(sequences_NT)
    ids = [_ids(tokens_T) for tokens_T in sequences_NT]
    # In tensor_id order, the tensors of a layer are neighbours, so only one decoded layer is in memory at a
    # time.
    by_layer = itertools.groupby(quantized, key=lambda item: layer_of(item[0]))
    with torch.inference_mode():
        with stream.ends() as ends:
            hidden = [ends.embed(ids_BT) for ids_BT in ids]
        for index in range(stream.layers):
            with stream.layer(index) as layer:
                _, weights = next(by_layer, (index, ()))
                named = layer.module.named_parameters(prefix=layer.prefix)
                _replace(dict(named), weights)
                hidden = [layer(hidden_BTH) for hidden_BTH in hidden]
            if progress is not None:
                progress(index + 1, stream.layers)
        with stream.ends() as ends:
            losses = [
                _loss(ends.logits(hidden_BTH), ids_BT, number)
                for number, (hidden_BTH, ids_BT) in enumerate(zip(hidden, ids, strict=True))
            ]
    return _mean(sum(losses), sequences_NT)


def apply_quantized(model: "PreTrainedModel", quantized: Iterable[tuple[str, QuantizedTensor]]) -> None:
    """Replace weights of the model by decoded ones, tensor by tensor. The originals are lost.

    Raises:
        InputError: the model lacks a tensor, or has it in another shape.
    """
    _replace(dict(model.named_parameters()), quantized)


def _replace(
    parameters: Mapping[str, nn.Parameter], quantized: Iterable[tuple[str, QuantizedTensor]]
) -> None:
    for name, tensor in quantized:
        parameter = parameters.get(name)
        if parameter is None or tuple(parameter.shape) != tensor.shape:
            raise InputError(
                f"{name}: expected a weight {tensor.shape} in the model, got {_shape(parameter)}"
            )
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(dequantize(tensor)))


def _check(sequences_NT: NDArray[np.int64]) -> None:
    if sequences_NT.ndim != 2 or sequences_NT.shape[0] < 1 or sequences_NT.shape[1] < 2:
        raise InputError(f"expected sequences [N, T] of at least 2 tokens, got shape {sequences_NT.shape}")


def _ids(tokens_T: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(tokens_T))[None]


def _loss(logits_BTV: torch.Tensor, ids_BT: torch.Tensor, sequence: int) -> float:
    """Return the sum of the losses of one sequence's predictions."""
    logits_TV, wanted_T = logits_BTV[0, :-1].float(), ids_BT[0, 1:].to(logits_BTV.device)
    # Convert to float64 before the sum, so that losses of long texts add up without large errors.
    loss = float(functional.cross_entropy(logits_TV, wanted_T, reduction="none").double().sum())
    if not math.isfinite(loss):
        raise InputError(f"The loss of sequence {sequence} is not finite: {loss}.")
    return loss


def _mean(total: float, sequences_NT: NDArray[np.int64]) -> Perplexity:
    tokens = sequences_NT.shape[0] * (sequences_NT.shape[1] - 1)
    return Perplexity(tokens=tokens, loss=total / tokens, perplexity=_exponential(total / tokens))


def _exponential(loss: float) -> float:
    # The exponential of a loss above 709 overflows, so a loss above 700 counts as 700. No useful model has
    # such a loss.
    return math.exp(min(loss, 700.0))


def _shape(parameter: torch.Tensor | None) -> object:
    return None if parameter is None else tuple(parameter.shape)
