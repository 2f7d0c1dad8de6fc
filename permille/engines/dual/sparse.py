"""Dual forwarding of sparse values: a package as a module whose inputs are the values of every variant.

    module = dual_model(package)
    loss_VBT = module(values_VK, ids_BT)          # both signs of all directions: one pass over the weights
    program = torch.export.export(module, (values_VK, ids_BT))

The frozen weights are read once for all variants (P-RGE, section 3.4, with the values in the place of LoRA's
B). What moves the values stays outside: integers on a lattice, as for every engine.

Plain PyTorch: `sparse_add` is an operator so that an exported program names it; a runtime may bring its own.

# Legend: V variants, B sequences, T tokens, M = B * T, K and N inputs and outputs of a linear, C its masked
weights; `values_VK` has the masked weights of the whole package.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from permille.engines.torch_model import MaskedLinear, TorchModel, load_torch_model
from permille.package.reader import Package


@torch.library.custom_op("permille::sparse_add", mutates_args=())
def sparse_add(y_VMN: Tensor, x_VMK: Tensor, values_VC: Tensor, row_C: Tensor, column_C: Tensor) -> Tensor:
    """`y_v + x_v S_v^T`, S_v [N, K] being zero but for `values_v` at (row, column)."""
    product_VMC = x_VMK[..., column_C] * values_VC[:, None]
    return y_VMN.index_add(2, row_C, product_VMC)


@sparse_add.register_fake
def _(y_VMN: Tensor, *_others: Tensor) -> Tensor:
    return torch.empty_like(y_VMN)


class DualSparseLinear(nn.Module):
    """`y_v = x_v W_v^T + b`: W is 0 at the mask, and each variant adds its own values there (ADR 12)."""

    def __init__(self, masked: MaskedLinear) -> None:
        """Take over a masked layer, whose weight is changed."""
        super().__init__()
        self.linear = masked.dense(torch.zeros_like(masked.values))
        self.values = nn.Parameter(masked.values.data[None], requires_grad=False)
        self.register_buffer("row_C", masked.row_C)
        self.register_buffer("column_C", masked.column_C)
        self.row_C: Tensor
        self.column_C: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[V * B, T, K] to [V * B, T, N]; `values` [V, C] is what `functional_call` replaced."""
        y, variants = self.linear(x), len(self.values)
        y_VMN, x_VMK = y.reshape(variants, -1, y.shape[-1]), x.reshape(variants, -1, x.shape[-1])
        added: Tensor = sparse_add(y_VMN, x_VMK, self.values, self.row_C, self.column_C)
        return added.view(y.shape)


class DualModel(nn.Module):
    """A package's losses and logits under several variants of the sparse values."""

    def __init__(self, package: Package, model: TorchModel) -> None:
        super().__init__()
        self.model = model.module
        self._counts = list(package.counts)
        self._value_names = model.value_names

    def forward(self, values_VK: Tensor, ids_BT: Tensor) -> Tensor:
        """`-log p(token t + 1 | tokens to t)` under every variant, float32 [V, B, T - 1]."""
        logits = self._logits(values_VK, ids_BT)[:, :-1]
        target = ids_BT[:, 1:].repeat(len(values_VK), 1)
        loss = functional.cross_entropy(
            logits.reshape(target.numel(), -1), target.reshape(-1), reduction="none"
        )
        return loss.view(len(values_VK), len(ids_BT), -1)

    def next_logits(self, values_1K: Tensor, ids_1T: Tensor, last: Tensor) -> Tensor:
        """Logits [1, 1, D] of what follows position `last` (int64 [1])."""
        return self._logits(values_1K, ids_1T, last)

    def _logits(self, values_VK: Tensor, ids_BT: Tensor, keep: Tensor | int = 0) -> Tensor:
        values = dict(zip(self._value_names, torch.split(values_VK, self._counts, dim=1), strict=True))
        ids = ids_BT.repeat(len(values_VK), 1)
        options = {"logits_to_keep": keep, "use_cache": False}
        logits: Tensor = functional_call(self.model, values, (ids,), options).logits
        return logits


def dual_model(package: Package) -> DualModel:
    """Build the module in float32, every linear decoded.

    Raises:
        InputError: a family that we do not know, or attention that is not causal.
    """
    model = load_torch_model(package, torch.device("cpu"), torch.float32)
    for name in model.value_names:
        path = name.removesuffix(".values")
        masked = model.module.get_submodule(path)
        assert isinstance(masked, MaskedLinear)  # what load_torch_model put there
        model.module.set_submodule(path, DualSparseLinear(masked))
    return DualModel(package, model).eval()
