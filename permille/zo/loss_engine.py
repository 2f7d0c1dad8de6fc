"""The seam to the forward pass, as estimators need it: a batch in, losses or derivatives out.

Shapes: K = masked weights, V = variants of the values, Q = queries, B = sequences, T = tokens of a sequence.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded sequences.

    Attributes:
        input_ids_BT: int64 token ids.
        attention_BT: bool, False at padding.
        target_BT: bool; `target[b, t]` counts the prediction OF token t from the tokens before it, so
            column 0 is False.
    """

    input_ids_BT: NDArray[np.int64]
    attention_BT: NDArray[np.bool_]
    target_BT: NDArray[np.bool_]


class LossEngine(Protocol):
    """The seam to the forward pass. A loss is the mean over all targets of the batch."""

    @property
    def k(self) -> int:
        """Number of masked weights."""
        ...

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Losses of v variants of the values on one batch, float32 [v]."""
        ...

    def directional_derivatives(
        self, values_K: NDArray[np.float32], directions_QK: NDArray[np.float32], batch: Batch
    ) -> tuple[float, NDArray[np.float64]]:
        """The loss `f` at `values_K`, and `grad f . direction` there for each direction, float64 [q]."""
        ...
