"""Adapters that recover a pruned model. Each linear has one, and it is merged at the end.

    LoRA       dW = B A                        A [r, K], B [N, r]            r (N + K) numbers
    pooling    dW[i, j] = G[i // n, j // k] / k   G [g, g]                   g^2 numbers   (equations 9 to 12)

Pooling averages `k` neighbouring inputs, multiplies the averages by G, and gives `n` neighbouring outputs the
same value. If g does not divide a side, the side is padded with zeros (equation 23). Both kinds start with
dW = 0. The equations are those of the paper on iterative sparse fine-tuning (docs/adr/0008).

The linear computes with `keep * (W + dW)`, where `keep` is 1 if W is not 0, else 0. With a dense adapter, it
computes with `W + dW` during training. Merging always writes `keep * (W + dW)`, so a pruned weight stays 0.

# Legend: N outputs and K inputs of a linear; r rank; g groups of a side; n = ceil(N / g), k = ceil(K / g).
"""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from permille_sparsify.recovery import LoraAdapter


class RecoveryAdapter(StrEnum):
    """Kind of adapter beside a linear while a sparse model recovers."""

    LORA = "lora"
    POOLING = "pooling"


class PoolingAdapter(nn.Module):
    """A change of a weight that is constant in each block of n x k weights."""

    def __init__(self, shape: tuple[int, int], groups: int) -> None:
        super().__init__()
        self._shape = shape
        self.g = nn.Parameter(torch.zeros(groups, groups))

    def forward(self) -> Tensor:
        """Return the change, [N, K]."""
        rows, columns = self._shape
        n, k = (-(-side // len(self.g)) for side in self._shape)
        blocks = (self.g / k).repeat_interleave(n, dim=0)[:rows]
        return blocks.repeat_interleave(k, dim=1)[:, :columns]


class Adapted(nn.Module):
    """A linear's weight and its adapter, as a torch parametrization. If `masked`, zeros stay 0."""

    def __init__(self, adapter: nn.Module, *, masked: bool) -> None:
        super().__init__()
        self.adapter = adapter
        self.masked = masked

    def forward(self, w_NK: Tensor) -> Tensor:
        """Return the weights that the linear computes with."""
        changed_NK = w_NK + self.adapter().to(w_NK.dtype)
        return torch.where(w_NK != 0, changed_NK, 0) if self.masked else changed_NK


def allocate(
    losses: Mapping[str, float], shapes: Mapping[str, tuple[int, int]], average: float
) -> dict[str, int]:
    """Return the groups `g` of each linear's pooling adapter, by the linear's loss (equation 22).

        P = average * loss / mean loss,   g = floor(sqrt(P)), at least 1 and at most the shorter side

    Args:
        losses: loss by pruning, by name of the weight: the squared error of the linear's output, relative to
            the square of the output. Equal losses give adapters of equal sizes.
        average: mean number of trained numbers of a linear.
    """
    mean = math.fsum(losses.values()) / len(losses)
    shares = {name: loss / mean if mean else 1.0 for name, loss in losses.items()}
    return {
        # The mean and the share are rounded, and a P just below a square would lose a group.
        name: min(max(1, math.isqrt(int(average * share * (1 + 1e-12)))), *shapes[name])
        for name, share in shares.items()
    }


def attach(
    model: nn.Module, sizes: Mapping[str, int], kind: RecoveryAdapter, *, masked: bool, seed: int
) -> list[nn.Parameter]:
    """Attach an adapter to each of these weights, freeze everything else, and return the trained parameters.

    Args:
        sizes: rank or number of groups, by name of the weight.
        masked: if True, pruned weights stay 0 while the adapter trains.
        seed: seed of the initial values of LoRA's A.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    found: list[nn.Parameter] = []
    for name, size in sizes.items():
        linear = _linear(model, name)
        shape = (linear.out_features, linear.in_features)
        adapter = (
            LoraAdapter(shape, size, generator)
            if kind is RecoveryAdapter.LORA
            else PoolingAdapter(shape, size)
        ).to(linear.weight.device)
        parametrize.register_parametrization(linear, "weight", Adapted(adapter, masked=masked))
        found.extend(adapter.parameters())
    return found


def merge(model: nn.Module) -> None:
    """Write `keep * (W + dW)` as the weights and remove the adapters. Pruned weights stay 0."""
    for module, adapted in list(_adapted(model)):
        adapted.masked = True
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def change_norms(model: nn.Module) -> tuple[float, float]:
    """Return the Euclidean norms of all adapters' changes, at kept and at pruned weights."""
    kept = pruned = 0.0
    with torch.no_grad():
        for module, adapted in _adapted(model):
            squares = adapted.adapter().double() ** 2
            keep = module.parametrizations["weight"].original != 0  # type: ignore[index, union-attr]
            kept += float(squares[keep].sum())
            pruned += float(squares[~keep].sum())
    return math.sqrt(kept), math.sqrt(pruned)


def _adapted(model: nn.Module) -> Iterator[tuple[nn.Module, Adapted]]:
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            yield module, module.parametrizations["weight"][0]  # type: ignore[index, misc]


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name.removesuffix(".weight"))
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{name}: expected a linear, got {type(module).__name__}")
    return module
