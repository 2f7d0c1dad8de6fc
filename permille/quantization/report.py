"""Error of a quantized weight against its source, in numpy alone.

    relative error = ||w - w'||_F / ||w||_F        max error = max |w - w'|

`w'` is the decoded weight. If all weights of a tensor are 0, its relative error is 0. Sums are float64.
"""

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray


class TensorError(TypedDict):
    """The errors of one tensor."""

    name: str
    shape: list[int]
    relative_error: float
    max_error: float


class Summary(TypedDict):
    """The errors of each tensor, and of all tensors together."""

    relative_error: float
    max_error: float
    tensors: list[TensorError]


class ErrorReport:
    """Collector of errors, tensor by tensor, so that only one pair of weights is in memory."""

    def __init__(self) -> None:
        self._rows: list[TensorError] = []
        self._squared_error = 0.0
        self._squared_weight = 0.0

    def add(self, name: str, w_NK: NDArray[np.float32], decoded_NK: NDArray[np.float32]) -> None:
        """Compare a source weight with its decoded codes."""
        difference = w_NK - decoded_NK
        squared_error = _sum_of_squares(difference)
        squared_weight = _sum_of_squares(w_NK)
        row = TensorError(
            name=name,
            shape=list(w_NK.shape),
            relative_error=_ratio(squared_error, squared_weight),
            max_error=float(np.abs(difference).max()),
        )
        self._rows.append(row)
        self._squared_error += squared_error
        self._squared_weight += squared_weight

    def summary(self) -> Summary:
        """Return the report so far, in a form for JSON."""
        return Summary(
            relative_error=_ratio(self._squared_error, self._squared_weight),
            max_error=max((row["max_error"] for row in self._rows), default=0.0),
            tensors=list(self._rows),
        )


def _sum_of_squares(w_NK: NDArray[np.float32]) -> float:
    return float(np.square(w_NK, dtype=np.float64).sum())


def _ratio(squared_error: float, squared_weight: float) -> float:
    return float(np.sqrt(squared_error / squared_weight)) if squared_weight > 0 else 0.0
