"""The model of a cell: loaded, stored as the cell says, with the method's numbers ready to train.

Storage is simulated exactly: every linear weight of the blocks holds the float32 value that its 16-bit or
4-bit form decodes to, and products are float32. A sparse method keeps its masked weights at bf16 over any
base, as packages do. Embeddings, norms and head are bf16 in every base but FLOAT32.
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
"""What the linear weights of the blocks decode to, by name."""

ROUNDED = {
    Base.NF4: (Scheme.NF4, 64),
    Base.INT4_G32: (Scheme.INT4, 32),
    Base.INT4_G128: (Scheme.INT4, 128),
    Base.INT8: (Scheme.INT8, 128),
}
"""Bases that need nothing but the weights: scheme and group size."""

CALIBRATED = {Base.AUTO_ROUND_INT4: (Scheme.INT4, rounding.GROUP_SIZE)}
"""Bases that need text."""

_UNQUANTIZED = {Base.FLOAT32: 4, Base.BF16: 2}


def stored(
    folder: Path,
    base: Base,
    mask: Mapping[str, NDArray[np.uint32]] | None = None,
    decoded: Decoded | None = None,
) -> "PreTrainedModel":
    """Load the model of a folder as its base stores it, float32 in memory.

    Args:
        mask: masked weights, which stay at bf16 whatever the base.
        decoded: the linear weights of a base that text calibrates (`calibrated`).
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
    """Decode the linear weights of a model under a base that needs text, for `stored`.

    Args:
        folder: the model.
        sequences_NT: calibration text, [N, T] token ids.
        iterations: steps of auto-round for each block.

    Raises:
        InputError: the base needs no text, or its library is not installed.
    """
    if base not in CALIBRATED:
        raise InputError(f"expected one of {', '.join(sorted(CALIBRATED))}, got {base.value}")
    model = stored(folder, Base.FLOAT32)
    layers = rounding.rounded_int4(model, linear_weights(model), sequences_NT, iterations=iterations)
    return {name: dequantize(layer) for name, layer in layers.items()}


def stored_bytes(base: Base, shapes: Iterable[tuple[int, int]]) -> int:
    """Bytes of weights of these shapes under a base, as packages hold them."""
    if base in _UNQUANTIZED:
        return sum(_UNQUANTIZED[base] * prod(shape) for shape in shapes)
    name, group_size = (ROUNDED | CALIBRATED)[base]
    how = Quantization(name=name, group_size=group_size)
    return sum(how.dense_bounds(shape)[0] for shape in shapes)


def give_own_values(
    model: "PreTrainedModel", own: "PreTrainedModel", mask: Mask, learned: set[tuple[str, int]]
) -> None:
    """Give the masked weights of `model` the values of `own`, except those that were trained before.

    Args:
        learned: (tensor, flat index) of every weight that was ever masked; this mask's are added.
    """
    source = dict(own.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fresh = [index for index in mask.get(name, ()) if (name, int(index)) not in learned]
            at = torch.tensor([int(index) for index in fresh], dtype=torch.int64)
            parameter.view(-1)[at] = source[name].reshape(-1)[at]
            learned.update((name, int(index)) for index in fresh)


def linear_weights(model: "PreTrainedModel") -> list[str]:
    """Return the names of the linear weights of the blocks, in the order of the model.

    Only these can be masked.
    """
    return [name for name, _ in scoped_tensors(model.config.to_dict(), "all")]


def linear_shapes(model: "PreTrainedModel") -> dict[str, tuple[int, ...]]:
    """Return the shapes of the linear weights of the blocks."""
    parameters = dict(model.named_parameters())
    return {name: tuple(parameters[name].shape) for name in linear_weights(model)}


def corpus_mask(model: "PreTrainedModel", sequences_NT: NDArray[np.int64], density: float) -> Mask:
    """The mask that the squared gradients on a corpus select (C4)."""
    return select_mask(fisher_scores(model, sequences_NT), MaskMethod.FISHER, density)


def task_mask(model: "PreTrainedModel", batches: Sequence[Batch], density: float) -> Mask:
    """The mask that the squared gradients of the task's loss select, one gradient an example.

    Args:
        batches: one example each.
    """
    shapes = linear_shapes(model)
    whole = {name: np.arange(prod(shape), dtype=np.uint32) for name, shape in shapes.items()}
    trainable = trainables.masked_weights(model, whole)
    sum_K = np.zeros(trainable.k, dtype=np.float32)
    for batch in batches:
        sum_K += np.square(trainable.gradient(trainable.base_K, batch)[1])
    ends = np.cumsum([prod(shape) for shape in shapes.values()])
    scores = {
        name: scores_K.reshape(shape)
        for (name, shape), scores_K in zip(shapes.items(), np.split(sum_K, ends[:-1]), strict=True)
    }
    return select_mask(scores, MaskMethod.FISHER, density)


def weight_mask(model: "PreTrainedModel", kind: MaskMethod, density: float, seed: int) -> Mask:
    """A mask that needs no gradient: random, or the largest weights."""
    parameters = dict(model.named_parameters())
    weights = {name: parameters[name].detach().numpy() for name in linear_weights(model)}
    return select_mask(weights, kind, density, seed=seed)


def adapted(model: "PreTrainedModel", method: Method, seed: int) -> Trainable:
    """The trained numbers of a method that has no mask.

    Raises:
        ValueError: the method has one.
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
