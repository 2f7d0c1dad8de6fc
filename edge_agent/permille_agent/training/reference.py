"""The package's reference of general text, as a run uses it: it pulls, it is measured on, and it asks.

A package without a reference bounds nothing, and its runs train as they always did.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.package.reader import Package
from permille.zo.estimators import Batch


class Reference(Protocol):
    """Public text and a few chat turns, with the base's own answers."""

    def pull(self, step: int) -> Batch:
        """Return the rows that pull a step towards the base."""
        ...

    def loss(self, engine: Engine, values_K: NDArray[np.float32]) -> float:
        """Measure the mean loss on the rows that pull no step, nats a token."""
        ...

    def questions(self) -> Sequence[str]:
        """Return the questions of the chat turns that are measured on; none where there are no turns."""
        ...


def reference_of(package: Package) -> Reference | None:  # noqa: ARG001 - no package has one yet
    """Read the reference of a package; None where it carries none."""
    return None
