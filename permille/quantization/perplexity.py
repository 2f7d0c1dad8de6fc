"""What a quantization costs in perplexity: a torch model before, and with its decoded weights in place.

    perplexity = exp(mean over all predictions of -log p(token | tokens before)), logits in float32

Needs torch, so nothing in the package's `__init__` imports it.
"""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from permille.errors import InputError
from permille.quantization import dequantize
from permille.quantization.types import Coded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Perplexity(TypedDict):
    """Of `tokens` predictions: the mean loss in nats, and its exponential."""

    tokens: int
    loss: float
    perplexity: float


def perplexity(
    model: "PreTrainedModel",
    sequences_NT: NDArray[np.int64],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Over [N, T] token ids, sequence by sequence: N * (T - 1) predictions. Sums are float64, in order.

    Raises:
        InputError: no prediction to make, or a loss that is not finite (names the sequence).
    """
    if sequences_NT.ndim != 2 or sequences_NT.shape[0] < 1 or sequences_NT.shape[1] < 2:
        raise InputError(f"expected sequences [N, T] of at least 2 tokens, got shape {sequences_NT.shape}")
    total = 0.0
    training = model.training
    model.eval()
    try:
        for index, tokens_T in enumerate(sequences_NT):
            total += _loss(model, tokens_T, index)
            if progress is not None:
                progress(index + 1, len(sequences_NT))
    finally:
        model.train(training)
    tokens = sequences_NT.shape[0] * (sequences_NT.shape[1] - 1)
    return Perplexity(tokens=tokens, loss=total / tokens, perplexity=_exponential(total / tokens))


def apply_quantized(model: "PreTrainedModel", quantized: Iterable[tuple[str, Coded]]) -> None:
    """Put decoded weights in the model's place, tensor by tensor; its own are gone afterwards.

    Raises:
        InputError: a tensor that the model lacks, or of another shape.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in quantized:
        parameter = parameters.get(name)
        if parameter is None or tuple(parameter.shape) != tensor.shape:
            raise InputError(
                f"{name}: expected a weight {tensor.shape} in the model, got {_shape(parameter)}"
            )
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(dequantize(tensor)))


def _loss(model: "PreTrainedModel", tokens_T: NDArray[np.int64], sequence: int) -> float:
    """Sum over the predictions of one sequence."""
    with torch.inference_mode():
        ids_BT = torch.from_numpy(np.ascontiguousarray(tokens_T))[None].to(model.device)
        logits_TV = model(input_ids=ids_BT, use_cache=False).logits[0, :-1].float()
        loss = float(functional.cross_entropy(logits_TV, ids_BT[0, 1:], reduction="none").double().sum())
    if not math.isfinite(loss):
        raise InputError(f"sequence {sequence}: expected a finite loss, got {loss}")
    return loss


def _exponential(loss: float) -> float:
    # A loss above 700 nats overflows; no model that predicts anything comes near.
    return math.exp(min(loss, 700.0))


def _shape(parameter: torch.Tensor | None) -> object:
    return None if parameter is None else tuple(parameter.shape)
