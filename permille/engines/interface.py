"""Interface of engines, between training or generation and the matrix code.

An engine holds one package on one device. It is handed sparse values, never seeds, directions or
optimizers, and it returns numbers as they come out of the forward pass: a loss that is not finite is
returned, not repaired.

Arrays: V variants, K masked weights of the whole package (tensors concatenated in `tensor_id` order),
B sequences, T positions.

Every implementation passes `tests/unit/engines/conformance.py`.
"""

from collections.abc import Iterator
from typing import Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from permille.engines.sampling import TokenSampling
from permille.zo.estimators import Batch, Differentiable, LossEngine

REVERSE_PASSES = 3
"""Layer passes of a gradient: forward, again within the reverse pass, and back."""


class EngineInfo(TypedDict):
    """Description of an engine in a report. A resumed run has the same bits only if it is equal."""

    name: str
    version: str
    compute_dtype: str
    threads: int
    device: str


class Engine(LossEngine, Protocol):
    """A loaded package: losses, and text for local use.

    Calls from several threads are safe and are served one at a time.
    """

    @property
    def layer_passes(self) -> int:
        """Count how often a sequence has passed through a decoder layer so far, forward or backward.

        Passes of all variants are summed, and work that variants share counts once. Divide by the number of
        layers to get forward passes of one row, the unit of the results pages.
        """

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Loss of each target token, float32 [targets], row-major in the batch; their mean is the loss."""

    def generate(
        self, values_K: NDArray[np.float32], prompt_ids: NDArray[np.int64], sampling: TokenSampling
    ) -> Iterator[int]:
        """Yield new token ids one by one, up to a stop id, the limit or the model's last position.

        Args:
            prompt_ids: int64 [T], T >= 1.

        Raises:
            InputError: an argument is outside its range; raised by the call, not by the first `next`.
        """

    def info(self) -> EngineInfo:
        """Name, version, compute dtype, threads and device."""


class GradientEngine(Engine, Differentiable, Protocol):
    """An engine that also differentiates backward: every masked weight's derivative in one call."""
