"""Squared gradients of single examples, summed: what selects a task's mask and what tells how much one holds.

`K` counts all weights of the tensors, one tensor after the other. No average is taken here: a mask is chosen
by the sums, bit for bit.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from permille.zo.estimators import Batch
from permille_lab.evaluate.trainables import Trainable, masked_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shapes = Mapping[str, tuple[int, ...]]
Scores = dict[str, NDArray[np.float32]]


def whole_tensors(model: "PreTrainedModel", shapes: Shapes) -> Trainable:
    """All weights of some tensors of a transformers model as one trainable; it is trained in place."""
    return masked_weights(
        model, {name: np.arange(prod(shape), dtype=np.uint32) for name, shape in shapes.items()}
    )


def summed_squares(
    trainable: Trainable, values_K: NDArray[np.float32], examples: Iterable[Batch]
) -> tuple[NDArray[np.float32], int]:
    """The sum of squared gradients at `values_K` in the examples' order, float32, and how many they were.

    Args:
        examples: one each; a batch of several would square the gradient of their mean.
    """
    sum_K = np.zeros(trainable.k, dtype=np.float32)
    number = 0
    for batch in examples:
        sum_K += np.square(trainable.gradient(values_K, batch)[1])
        number += 1
    return sum_K, number


def by_tensor(values_K: NDArray[np.float32], shapes: Shapes) -> Scores:
    """Views of the values, each with its tensor's name and shape."""
    found, start = {}, 0
    for name, shape in shapes.items():
        end = start + prod(shape)
        found[name] = values_K[start:end].reshape(shape)
        start = end
    return found
