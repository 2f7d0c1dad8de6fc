"""How far a quantized weight is from its source, with the overlay in place. numpy only.

    relative error = ||w - w'||_F / ||w||_F        max error = max |w - w'|

`w'` is the decoded weight with the source's own values at masked positions, for that is what a layer
computes with. A weight of zeros alone has relative error 0. Sums are float64.
"""

from collections.abc import Iterable
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from permille.quantization.types import QuantizedTensor


class TensorError(TypedDict):
    """One line of the table."""

    name: str
    shape: list[int]
    relative_error: float
    max_error: float


class Summary(TypedDict):
    """The table, and the relative error over all tensors together."""

    relative_error: float
    max_error: float
    tensors: list[TensorError]


def keep_of(indices: NDArray[np.uint32], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """A tensor's mask as `quantize` takes it: bool [N, K]."""
    keep = np.zeros(shape[0] * shape[1], np.bool_)
    keep[indices] = True
    return keep.reshape(shape)


def overlaid(
    decoded_NK: NDArray[np.float32], w_NK: NDArray[np.float32], indices: NDArray[np.uint32] | None
) -> NDArray[np.float32]:
    """`decoded` with the values of `w` at the masked positions, in place."""
    if indices is not None:
        decoded_NK.reshape(-1)[indices] = w_NK.reshape(-1)[indices]
    return decoded_NK


class ErrorReport:
    """Collects tensor by tensor, so that no two weights need to be in memory at once."""

    def __init__(self) -> None:
        self._rows: list[TensorError] = []
        self._squared_error = 0.0
        self._squared_weight = 0.0

    def add(self, name: str, w_NK: NDArray[np.float32], effective_NK: NDArray[np.float32]) -> TensorError:
        """Measure one tensor: its source against what a layer would compute with."""
        difference = w_NK - effective_NK
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
        return row

    def summary(self) -> Summary:
        """The report so far, as JSON can hold it."""
        return Summary(
            relative_error=_ratio(self._squared_error, self._squared_weight),
            max_error=max((row["max_error"] for row in self._rows), default=0.0),
            tensors=list(self._rows),
        )


def error_of(
    tensors: Iterable[tuple[str, NDArray[np.float32], QuantizedTensor, NDArray[np.uint32] | None]],
) -> Summary:
    """The report over (name, source weight, quantized weight, mask's indices or None)."""
    from permille.quantization import dequantize

    report = ErrorReport()
    for name, w_NK, quantized, indices in tensors:
        report.add(name, w_NK, overlaid(dequantize(quantized), w_NK, indices))
    return report.summary()


def _sum_of_squares(w_NK: NDArray[np.float32]) -> float:
    return float(np.square(w_NK, dtype=np.float64).sum())


def _ratio(squared_error: float, squared_weight: float) -> float:
    return float(np.sqrt(squared_error / squared_weight)) if squared_weight > 0 else 0.0
