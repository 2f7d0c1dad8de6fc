"""How much of the squared gradient a few weights hold, and whether they still do while a model is trained.

- `layer_shares`: figure 2 (and 7) of the sensitive-sparse paper: each layer's squared gradients in falling
  order, their cumulative share at some fractions, mean and deviation over the layers.
- `squared_gradients`: mean over examples of the squared gradient of one example, of every linear weight.
- `held_shares`: figure 3 (and 8): share of the squared gradient that masks hold, mean over the layers.

Masks are selected on some examples and judged on others: a mask that is judged on the gradients that
selected it holds their noise too, and looks better than it is. The paper's figures do not say so of theirs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.sensitivity.coverage import coverage_by_tensor
from permille.sensitivity.masks import Mask
from permille.zo.estimators import Batch
from permille_lab.evaluate.models import linear_shapes
from permille_lab.evaluate.squares import Scores, by_tensor, summed_squares, whole_tensors
from permille_lab.evaluate.trainables import Trainable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShares:
    """Cumulative shares at fractions [F], mean and deviation over layers."""

    fractions: tuple[float, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


def layer_shares(scores: Mapping[str, NDArray[np.float32]], fractions: Sequence[float]) -> LayerShares:
    """Cumulative normalised sum of scores in falling order, layer by layer.

    Args:
        scores: squared gradients by tensor, at least 0.
        fractions: above 0 and at most 1; of a tensor at least one weight is taken.

    Raises:
        InputError: no tensor, a fraction out of range, or a tensor whose scores are all 0 or not finite.
    """
    if not scores or not fractions or min(fractions) <= 0 or max(fractions) > 1:
        raise InputError(f"expected scores and fractions above 0 and at most 1, got {list(fractions)}")
    rows = []
    for name, score in scores.items():
        falling = np.sort(score.reshape(-1).astype(np.float64))[::-1]
        total = falling.sum()
        if not (np.isfinite(total) and total > 0 and falling[-1] >= 0):
            raise InputError(f"expected finite scores, not all 0, in {name}, got a sum of {total}")
        counts = [max(1, round(fraction * falling.size)) for fraction in fractions]
        rows.append(falling.cumsum()[np.array(counts) - 1] / total)
    shares_LF = np.array(rows)
    return LayerShares(
        fractions=tuple(fractions),
        mean=tuple(shares_LF.mean(axis=0).tolist()),
        deviation=tuple(shares_LF.std(axis=0).tolist()),
    )


class LinearWeights:
    """All linear weights of a model's blocks as one trainable, and their gradients by tensor."""

    def __init__(self, model: "PreTrainedModel") -> None:
        """
        Args:
            model: a transformers model of a known family; it is trained in place.
        """
        self._shapes = linear_shapes(model)
        self.trainable: Trainable = whole_tensors(model, self._shapes)

    def squared_gradients(self, values_K: NDArray[np.float32], examples: Iterable[Batch]) -> Scores:
        """Mean of the squared gradients of single examples, float32 by tensor.

        Raises:
            InputError: no example.
        """
        sum_K, number = summed_squares(self.trainable, values_K, examples)
        if not number:
            raise InputError("expected examples, got none")
        return by_tensor(sum_K / np.float32(number), self._shapes)


def held_shares(scores: Mapping[str, NDArray[np.float32]], masks: Mapping[str, Mask]) -> dict[str, float]:
    """Share of each layer's squared gradient on a mask, mean over the layers, by the masks' names.

    Raises:
        InputError: a mask has other tensors than the scores.
    """
    return {
        name: float(np.mean([row["coverage"] for row in coverage_by_tensor(scores, mask)]))
        for name, mask in masks.items()
    }
