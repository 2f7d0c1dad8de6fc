"""MeZO: zeroth-order descent on all weights, in place (Malladi et al. 2023, algorithm 1).

    w += epsilon z;  loss_plus;  w -= 2 epsilon z;  loss_minus;  w += epsilon z;  w -= lr * projected_grad * z

z is Gaussian and is generated again from its seed for each of the four moves. As in the published method,
each addition and subtraction is rounded, so the weights drift.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Mezo:
    """The optimizer of one model's weights."""

    def __init__(self, parameters: Iterable[Tensor], *, epsilon: float, learning_rate: float) -> None:
        self._parameters = list(parameters)
        self._epsilon = epsilon
        self._learning_rate = learning_rate

    def step(self, loss: Callable[[], float], seed: int) -> float:
        """Take one step and return the mean of the two losses. `loss` must read the current weights."""
        self._move(seed, self._epsilon)
        loss_plus = loss()
        self._move(seed, -2 * self._epsilon)
        loss_minus = loss()
        self._move(seed, self._epsilon)
        projected_grad = (loss_plus - loss_minus) / (2 * self._epsilon)
        self._move(seed, -self._learning_rate * projected_grad)
        return (loss_plus + loss_minus) / 2

    def _move(self, seed: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._parameters:
                z = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(z, alpha=scale)
