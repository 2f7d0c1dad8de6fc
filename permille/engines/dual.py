"""Dual forwarding of sparse values: a package as a module whose inputs are the values of every variant.

    module = dual_model(package)
    loss_RT = module(values_VK, variant_R, ids_RT)     # both signs of all directions in one pass
    program = torch.export.export(module, (values_VK, variant_R, ids_RT))

The frozen weights are read once for all variants (P-RGE, section 3.4, with the values in the place of LoRA's
B). What moves the values stays outside: integers on a lattice, as for every engine.

Plain PyTorch: `sparse_add` is an operator so that an exported program names it; a runtime may bring its own.

# Legend: V variants, R rows of the pass (a sequence under a variant each), T tokens, K and N inputs and
# outputs of a linear, C its masked weights; `values_VK` has the masked weights of the whole package.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from permille.engines.decoded_model import DecodedModel, MaskedLinear, load_decoded_model
from permille.errors import InputError
from permille.package.reader import Package


@torch.library.custom_op("permille::sparse_add", mutates_args=())
def sparse_add(
    y_RTN: Tensor, x_RTK: Tensor, values_VC: Tensor, variant_R: Tensor, row_C: Tensor, column_C: Tensor
) -> Tensor:
    """`y_r + x_r S_v^T`, v the row's variant, S_v [N, K] zero but for `values_v` at (row, column)."""
    product_RTC = x_RTK[..., column_C] * values_VC[variant_R, None]
    return y_RTN.index_add(2, row_C, product_RTC)


@sparse_add.register_fake
def _(y_RTN: Tensor, *_others: Tensor) -> Tensor:
    return torch.empty_like(y_RTN)


class DualSparseLinear(nn.Module):
    """`y_v = x_v W_v^T + b`: W is 0 at the mask, and each variant adds its own values there (ADR 12)."""

    def __init__(self, masked: MaskedLinear) -> None:
        """Take over a masked layer, whose weight is changed."""
        super().__init__()
        self.linear = masked.dense(torch.zeros_like(masked.values))
        self.values = nn.Parameter(masked.values.data[None], requires_grad=False)
        self.register_buffer("variant_R", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("row_C", masked.row_C)
        self.register_buffer("column_C", masked.column_C)
        self.variant_R: Tensor
        self.row_C: Tensor
        self.column_C: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[R, T, K], or OPT's [R * T, K]; `values` [V, C] and `variant_R` are replaced from outside."""
        y: Tensor = self.linear(x)
        x_RTK, y_RTN = (tensor.reshape(len(self.variant_R), -1, tensor.shape[-1]) for tensor in (x, y))
        added: Tensor = sparse_add(y_RTN, x_RTK, self.values, self.variant_R, self.row_C, self.column_C)
        return added.view(y.shape)


class DualModel(nn.Module):
    """A package's token losses under several variants of the sparse values."""

    def __init__(self, package: Package, model: DecodedModel) -> None:
        super().__init__()
        self.model = model.module
        self._counts = list(package.counts)
        self._value_names = model.value_names

    def forward(self, values_VK: Tensor, variant_R: Tensor, ids_RT: Tensor) -> Tensor:
        """`-log p(token t + 1 | tokens to t)` of each row under its variant, float32 [R, T - 1]."""
        replaced = dict(zip(self._value_names, torch.split(values_VK, self._counts, dim=1), strict=True))
        replaced |= {name.removesuffix("values") + "variant_R": variant_R for name in self._value_names}
        logits = functional_call(self.model, replaced, (ids_RT,), {"use_cache": False}).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), ids_RT[:, 1:].flatten(), reduction="none")
        return loss.view(len(ids_RT), -1)


def dual_model(package: Package) -> DualModel:
    """Build the module in float32, every linear decoded.

    Raises:
        InputError: a family that we do not know, attention that is not causal, or an adapter.
    """
    if package.manifest.adapter is not None:
        raise InputError("expected a package with a mask, got one with an adapter")
    model = load_decoded_model(package)
    for name in model.value_names:
        path = name.removesuffix(".values")
        masked = model.module.get_submodule(path)
        assert isinstance(masked, MaskedLinear)  # what load_decoded_model put there
        model.module.set_submodule(path, DualSparseLinear(masked))
    return DualModel(package, model).eval()
