"""The model of a cell: stored in the base of the cell, with the numbers of its method ready to train.

The storage is simulated exactly: each linear of the decoder layers has the float32 values to which its stored
form decodes. Products are float32. Masked weights of sparse methods are bf16 over any base, as in packages.
Embeddings, norms and head are bf16 in all bases except FLOAT32.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from permille.choices import MaskMethod
from permille.errors import InputError
from permille.models.families import scoped_tensors
from permille.models.loading import load_model
from permille.package.manifest import Quantization
from permille.quantization import dequantize, quantize, rounding
from permille.quantization.types import Scheme
from permille.sensitivity.fisher import fisher_scores
from permille.sensitivity.masks import Mask, select_mask
from permille.zo.estimators import Batch
from permille_lab.evaluate.methods import Method, TrainedSet
from permille_lab.evaluate.specification import Base
from permille_lab.models import trainables
from permille_lab.models.trainables import Trainable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Decoded = Mapping[str, NDArray[np.float32]]
"""Decoded linears of the decoder layers, by name."""

ROUNDED = {
    Base.NF4: (Scheme.NF4, 64),
    Base.INT4_G32: (Scheme.INT4, 32),
    Base.INT4_G128: (Scheme.INT4, 128),
    Base.INT8: (Scheme.INT8, 128),
}
"""Scheme and group size of bases that need no calibration text."""

CALIBRATED = {Base.AUTO_ROUND_INT4: (Scheme.INT4, rounding.GROUP_SIZE)}
"""Scheme and group size of bases that need calibration text."""

_UNQUANTIZED = {Base.FLOAT32: 4, Base.BF16: 2}


def stored(
    folder: Path,
    base: Base,
    mask: Mapping[str, NDArray[np.uint32]] | None = None,
    decoded: Decoded | None = None,
) -> "PreTrainedModel":
    """Load a model with its weights rounded as the base stores them. In memory they are float32.

    Args:
        mask: masked weights, which are bf16 in any base.
        decoded: the result of `calibrated`, for a base that needs calibration text.
    """
    model = load_model(folder).float()
    if base is Base.FLOAT32:
        return model
    names = set(linear_weights(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rounded = parameter.bfloat16().float()
            if base is not Base.BF16 and name in names:
                if decoded is None:
                    scheme, group_size = ROUNDED[base]
                    own_NK = dequantize(quantize(parameter.numpy(), scheme, group_size, name=name))
                else:
                    own_NK = decoded[name].copy()
                parameter.copy_(_overlaid(torch.from_numpy(own_NK), rounded, name, mask))
            else:
                parameter.copy_(rounded)
    return model


def calibrated(
    folder: Path, base: Base, sequences_NT: NDArray[np.int64], *, iterations: int = rounding.ITERATIONS
) -> Decoded:
    """Return a model's decoded linears in a base that needs calibration text, for `stored`.

    Args:
        folder: folder of the model.
        sequences_NT: token ids of the calibration text, [N, T].
        iterations: number of auto-round's steps for each decoder layer.

    Raises:
        InputError: the base needs no text, or its library is not installed.
    """
    if base not in CALIBRATED:
        raise InputError(f"expected one of {', '.join(sorted(CALIBRATED))}, got {base.value}")
    model = stored(folder, Base.FLOAT32)
    layers = rounding.rounded_int4(model, linear_weights(model), sequences_NT, iterations=iterations)
    return {name: dequantize(layer) for name, layer in layers.items()}


def stored_bytes(base: Base, shapes: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of linears of these shapes in a package with this base."""
    if base in _UNQUANTIZED:
        return sum(_UNQUANTIZED[base] * prod(shape) for shape in shapes)
    name, group_size = (ROUNDED | CALIBRATED)[base]
    how = Quantization(name=name, group_size=group_size)
    return sum(how.dense_bounds(shape)[0] for shape in shapes)


def give_own_values(
    model: "PreTrainedModel", own: "PreTrainedModel", mask: Mask, learned: set[tuple[str, int]]
) -> None:
    """Give the masked weights of `model` the values of `own`, except weights that were masked before.

    Args:
        learned: tensor and flat index of each weight that was ever masked. Those of `mask` are added.
    """
    source = dict(own.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fresh = [index for index in mask.get(name, ()) if (name, int(index)) not in learned]
            at = torch.tensor([int(index) for index in fresh], dtype=torch.int64)
            parameter.view(-1)[at] = source[name].reshape(-1)[at]
            learned.update((name, int(index)) for index in fresh)


def linear_weights(model: "PreTrainedModel") -> list[str]:
    """Return the names of the linears of the decoder layers, in the order of the model.

    Only these can be masked.
    """
    return [name for name, _ in scoped_tensors(model.config.to_dict(), "all")]


def linear_shapes(model: "PreTrainedModel") -> dict[str, tuple[int, ...]]:
    """Return the shapes of the linears of the decoder layers, by name."""
    parameters = dict(model.named_parameters())
    return {name: tuple(parameters[name].shape) for name in linear_weights(model)}


def corpus_mask(model: "PreTrainedModel", sequences_NT: NDArray[np.int64], density: float) -> Mask:
    """Return the mask of the largest Fisher scores on a corpus, such as C4."""
    return select_mask(fisher_scores(model, sequences_NT), MaskMethod.FISHER, density)


def task_mask(model: "PreTrainedModel", batches: Sequence[Batch], density: float) -> Mask:
    """Return the mask of the largest squared gradients of the task's loss, summed over the examples.

    Args:
        batches: batches of one example each.
    """
    return select_mask(task_scores(model, batches), MaskMethod.FISHER, density)


def task_scores(model: "PreTrainedModel", batches: Sequence[Batch]) -> dict[str, NDArray[np.float32]]:
    """Return the squared gradients of the task's loss, summed over examples, for `task_mask`."""
    shapes = linear_shapes(model)
    whole = {name: np.arange(prod(shape), dtype=np.uint32) for name, shape in shapes.items()}
    trainable = trainables.masked_weights(model, whole)
    sum_K = np.zeros(trainable.k, dtype=np.float32)
    for batch in batches:
        sum_K += np.square(trainable.gradient(trainable.base_K, batch)[1])
    ends = np.cumsum([prod(shape) for shape in shapes.values()])
    return {
        name: scores_K.reshape(shape)
        for (name, shape), scores_K in zip(shapes.items(), np.split(sum_K, ends[:-1]), strict=True)
    }


def weight_mask(model: "PreTrainedModel", kind: MaskMethod, density: float, seed: int) -> Mask:
    """Return a mask that needs no gradient: random weights, or the largest weights."""
    parameters = dict(model.named_parameters())
    weights = {name: parameters[name].detach().numpy() for name in linear_weights(model)}
    return select_mask(weights, kind, density, seed=seed)


def adapted(model: "PreTrainedModel", method: Method, seed: int) -> Trainable:
    """Return the trainable of a method without a mask.

    Raises:
        ValueError: the method has a mask or trains nothing.
    """
    if method.trained is TrainedSet.FULL:
        return trainables.all_weights(model)
    if method.trained in (TrainedSet.LORA, TrainedSet.LORA_FA):
        return trainables.lora(
            model, method.size or 0, frozen_a=method.trained is TrainedSet.LORA_FA, seed=seed
        )
    if method.trained in (TrainedSet.PREFIX, TrainedSet.PREFIX_REAL):
        real = method.trained is TrainedSet.PREFIX_REAL
        return trainables.prefix(model, method.size or 0, real=real, seed=seed)
    raise ValueError(f"expected a method without a mask, got {method.name}")


def _overlaid(
    decoded_NK: torch.Tensor, own_NK: torch.Tensor, name: str, mask: Mapping[str, NDArray[np.uint32]] | None
) -> torch.Tensor:
    if mask is not None and name in mask:
        index = torch.from_numpy(mask[name].astype(np.int64))
        decoded_NK.view(-1)[index] = own_NK.reshape(-1)[index]
    return decoded_NK
