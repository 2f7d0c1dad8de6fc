"""The gradient of a few weights of a linear layer, without the layer's whole weight gradient.

With a mask of one in a thousand, the product that makes all of `dL/dW` is a third of a forward and backward
pass spent on numbers that are thrown away.

# Legend: T tokens, N outputs, I inputs, K masked weights of the layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SPARSE_SHARE = 1 / 64
"""Above this share of a layer's weights its whole gradient is cheaper: two columns a weight are read."""


class _MaskedLinear(torch.autograd.Function):
    """`x @ W.T + b`, whose gradient by `weights_K` is that of the weights at (rows_K, columns_K)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights_K: Tensor, layer: nn.Linear, rows_K: Tensor, columns_K: Tensor
    ) -> Tensor:
        del weights_K  # they stand in the layer; this is the leaf that their gradient belongs to
        ctx.save_for_backward(x, rows_K, columns_K)
        ctx.weight_NI = layer.weight.detach()
        return functional.linear(x, layer.weight.detach(), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, rows_K, columns_K = ctx.saved_tensors
        dx = dy @ ctx.weight_NI if ctx.needs_input_grad[0] else None
        dy_TN, x_TI = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        return dx, (dy_TN[:, rows_K] * x_TI[:, columns_K]).sum(dim=0), None, None, None


@contextmanager
def masked_gradients(layers: Sequence[tuple[nn.Linear, Tensor]]) -> Iterator[list[Tensor]]:
    """Within it, a backward pass adds to the `.grad` of one leaf a layer, float32 [K].

    Args:
        layers: each with the flat indices of its masked weights, int64 [K]; no layer twice, and none with a
            `forward` of its own.
    """
    leaves = []
    for layer, index_K in layers:
        leaf_K = torch.zeros(len(index_K), requires_grad=True)
        rows_K, columns_K = index_K // layer.in_features, index_K % layer.in_features
        leaves.append(leaf_K)
        layer.forward = partial(_forward, leaf_K, layer, rows_K, columns_K)  # type: ignore[method-assign]
    try:
        yield leaves
    finally:
        for layer, _ in layers:
            del layer.forward


def _forward(leaf_K: Tensor, layer: nn.Linear, rows_K: Tensor, columns_K: Tensor, x: Tensor) -> Tensor:
    result: Tensor = _MaskedLinear.apply(x, leaf_K, layer, rows_K, columns_K)  # type: ignore[no-untyped-call]
    return result
