"""Muon for the matrices of the layers, AdamW for the rest; both with a state that a checkpoint holds.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): the momentum of a matrix is brought
near the closest orthogonal matrix by five steps of a quintic iteration. `torch.optim.Muon` computes them in
bfloat16, which processors without it emulate slowly; here the type is chosen, and all matrices of one shape
go at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonal(g: Tensor) -> Tensor:
    """Matrices (..., m, n) with the singular vectors of `g` and singular values near one."""
    a, b, c = _QUINTIC
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Optimizer:
    """One step over named parameters.

    Args:
        matrix_rate: step size of Muon, scaled by max(1, m/n)^0.5 for an (m, n) matrix.
        rate: step size of AdamW for the head and the norms; embeddings take `embed_rate`.
        iteration: type in which Muon's quintic steps are computed; momenta and weights are float32.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        *,
        matrix_rate: float = 0.02,
        rate: float = 3e-3,
        embed_rate: float = 2e-2,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        decay: float = 0.05,
        iteration: torch.dtype = torch.float32,
    ) -> None:
        self.iteration = iteration
        self.parameters = parameters
        self.matrix_rate, self.rate, self.embed_rate = matrix_rate, rate, embed_rate
        self.momentum, self.betas, self.decay = momentum, betas, decay
        shapes: dict[tuple[int, ...], list[str]] = {}
        self.rest = []
        for name, value in parameters.items():
            if value.dim() == 2 and ".layers." in name:
                shapes.setdefault(tuple(value.shape), []).append(name)
            else:
                self.rest.append(name)
        self.stacks = list(shapes.values())
        self.steps = 0
        self.state: dict[str, Tensor] = {}
        for name, value in parameters.items():
            self.state[name + ".first"] = torch.zeros_like(value, requires_grad=False)
            if name in self.rest:
                self.state[name + ".second"] = torch.zeros_like(value, requires_grad=False)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply the gradients with all step sizes times `scale`, and clear them."""
        self.steps += 1
        for names in self.stacks:
            self._muon(names, scale)
        for name in self.rest:
            self._adam(name, scale)
        for value in self.parameters.values():
            value.grad = None

    def _muon(self, names: list[str], scale: float) -> None:
        updates = []
        for name in names:
            gradient = self.parameters[name].grad
            assert gradient is not None
            first = self.state[name + ".first"]
            first.lerp_(gradient, 1 - self.momentum)
            updates.append(gradient.lerp(first, self.momentum))  # Nesterov
        rows, columns = updates[0].shape
        rate = scale * self.matrix_rate * max(1.0, rows / columns) ** 0.5
        for name, update in zip(names, orthogonal(torch.stack(updates).to(self.iteration)), strict=True):
            self.parameters[name].mul_(1 - rate * self.decay).sub_(rate * update)

    def _adam(self, name: str, scale: float) -> None:
        value = self.parameters[name]
        assert value.grad is not None
        first, second = self.state[name + ".first"], self.state[name + ".second"]
        b1, b2 = self.betas
        first.lerp_(value.grad, 1 - b1)
        second.lerp_(value.grad.square(), 1 - b2)
        rate = scale * (self.embed_rate if "embed_tokens" in name else self.rate)
        root = (second / (1 - b2**self.steps)).sqrt_().add_(1e-8)
        value.sub_((first / (1 - b1**self.steps)) / root, alpha=rate)
