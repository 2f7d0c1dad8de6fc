"""Dual forwarding of LoRA-FA: a step of zeroth-order descent as one call of a graph (P-RGE, algorithm 1).

    module = lora_fa_model(package, rank=16, queries=4)
    loss_QSBT = module(ids_BT, StepInput(...))    # S: the positive and the negative sign

A is random and frozen, B is what is trained. The graph holds a copy of B for each direction and sign. A call
takes the projected gradients of the call before it, finds that call's directions as half the difference of
two copies, steps, perturbs anew and runs all copies in one batch:

    diff_q = (B[q, +] - B[q, -]) / 2
    B = (B[0, +] + B[0, -]) / 2 - rate * mean_q(g_q * diff_q / epsilon)
    B[q, +-] = B +- epsilon * z_q

Ours that the paper has not: the centre is one pair's for all copies, so that they cannot drift apart, and
signs z come from a seed in integer arithmetic, Philox4x32-10 inside the graph (FORMAT 6.3, a direction's
tensor being one B), so that they are equal wherever the graph runs. The update itself is float32, and is not
on a lattice: such a run has no log.

# Legend: Q directions, S signs, B sequences, T tokens, R rank, K and N inputs and outputs, P blocks.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from permille.engines.torch_model import MaskedLinear, TorchModel, load_torch_model
from permille.package.reader import Package
from permille.zo.philox import BLOCK_BITS, WORDS

_LOW = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class StepInput(NamedTuple):
    """What a call needs besides the tokens.

    Attributes:
        seed: int64 [2], the key's low and high word.
        step: int64 [1].
        projected_grad_Q: of the call before, float32; zeros at the first one.
        rate: learning rate, float32 [1].
        epsilon: float32 [1], the same in all calls.
    """

    seed: Tensor
    step: Tensor
    projected_grad_Q: Tensor
    rate: Tensor
    epsilon: Tensor


class LoraFALinear(nn.Module):
    """`y = x W^T + b + (x A) B_v`, B_v being the copy of the row's direction and sign."""

    def __init__(self, linear: nn.Linear, a_KR: Tensor, copies: int) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("a_KR", a_KR)
        self.a_KR: Tensor
        zeros = torch.zeros(copies, a_KR.shape[1], linear.out_features)
        self.b_copies = nn.Parameter(zeros, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[Q * S * B, T, K] to [Q * S * B, T, N]; `b_copies` [Q * S, R, N] is what was replaced."""
        y: Tensor = self.linear(x)
        low = (x @ self.a_KR).reshape(len(self.b_copies), -1, self.a_KR.shape[1])
        return y + torch.bmm(low, self.b_copies).view(y.shape)


class LoraFAModel(nn.Module):
    """A package with LoRA-FA on its linears; each call is a step."""

    def __init__(self, model: TorchModel, queries: int) -> None:
        super().__init__()
        self.model = model.module
        self._paths = tuple(name.removesuffix(".values") for name in model.value_names)
        self._queries = queries
        for tensor, path in enumerate(self._paths):
            shape = self.model.get_parameter(f"{path}.b_copies").shape[1:]
            self.register_buffer(f"copies_{tensor}", torch.zeros(queries, 2, *shape))

    def forward(self, ids_BT: Tensor, step: StepInput) -> Tensor:
        """`-log p(token t + 1 | tokens to t)` by direction and sign, float32 [Q, S, B, T - 1]."""
        values: dict[str, Tensor] = {}
        for tensor, path in enumerate(self._paths):
            copies: Tensor = getattr(self, f"copies_{tensor}")
            moved = stepped(copies, tensor, step)
            copies.copy_(moved)
            values[f"{path}.b_copies"] = moved.flatten(0, 1)
        ids = ids_BT.repeat(2 * self._queries, 1)
        logits = functional_call(self.model, values, (ids,), {"use_cache": False}).logits[:, :-1]
        target = ids[:, 1:].reshape(-1)
        loss = functional.cross_entropy(logits.reshape(len(target), -1), target, reduction="none")
        return loss.view(self._queries, 2, len(ids_BT), -1)


def lora_fa_model(package: Package, *, rank: int, queries: int) -> LoraFAModel:
    """Build the module in float32, on the package's own values; B is zero and A Gaussian over sqrt(K).

    Raises:
        InputError: a family that we do not know, attention that is not causal, or a package with an adapter.
    """
    package.mask(package.manifest.tensors[0].name)  # refuses an adapter
    model = load_torch_model(package, torch.device("cpu"), torch.float32)
    rng, start, own_K = np.random.default_rng(0), 0, torch.from_numpy(package.values().copy())
    for name in model.value_names:
        path = name.removesuffix(".values")
        masked = model.module.get_submodule(path)
        assert isinstance(masked, MaskedLinear)  # what load_torch_model put there
        count = len(masked.row_C)
        linear = masked.dense(own_K[start : start + count])
        start += count
        a_KR = rng.standard_normal((linear.in_features, rank)) / math.sqrt(linear.in_features)
        layer = LoraFALinear(linear, torch.from_numpy(a_KR.astype(np.float32)), 2 * queries)
        model.module.set_submodule(path, layer)
    return LoraFAModel(model, queries).eval()


def stepped(copies_QSRN: Tensor, tensor: int, step: StepInput) -> Tensor:
    """Lines 2 to 6 of the algorithm: the copies of one B after a step, perturbed anew."""
    diff_QRN = (copies_QSRN[:, 0] - copies_QSRN[:, 1]) / 2
    slope_QRN = step.projected_grad_Q[:, None, None] * (diff_QRN / step.epsilon)
    centre_RN = (copies_QSRN[0, 0] + copies_QSRN[0, 1]) / 2 - step.rate * slope_QRN.mean(0)
    queries, shape = len(copies_QSRN), tuple(centre_RN.shape)
    z_QRN = signs(step, tensor, queries, math.prod(shape)).view(queries, *shape)
    moved_QRN = step.epsilon * z_QRN
    return torch.stack([centre_RN + moved_QRN, centre_RN - moved_QRN], dim=1)


def signs(step: StepInput, tensor: int, queries: int, count: int) -> Tensor:
    """Fair signs float32 [Q, count], those of `permille.zo.directions.direction` for this tensor."""
    blocks = -(-count // BLOCK_BITS)
    block_QP = torch.arange(blocks, dtype=torch.int64).repeat(queries, 1)
    query_QP = torch.arange(queries, dtype=torch.int64)[:, None].expand(queries, blocks)
    words = _philox(
        block_QP, torch.full_like(block_QP, tensor), step.step + block_QP * 0, query_QP, step.seed
    )
    word_QPW = torch.stack(words, dim=-1)
    bits = (word_QPW[..., None] >> torch.arange(BLOCK_BITS // WORDS)) & 1
    return (2 * bits.reshape(queries, -1)[:, :count] - 1).to(torch.float32)


def _philox(x0: Tensor, x1: Tensor, x2: Tensor, x3: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """`permille.zo.philox` in int64: a product's 64 bits are right though its sign is not."""
    key_0, key_1 = seed[0], seed[1]
    for _ in range(_ROUNDS):
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x2 = ((p1 >> 32) & _LOW) ^ x1 ^ key_0, ((p0 >> 32) & _LOW) ^ x3 ^ key_1
        x1, x3 = p1 & _LOW, p0 & _LOW
        key_0, key_1 = (key_0 + _WEYL[0]) & _LOW, (key_1 + _WEYL[1]) & _LOW
    return x0, x1, x2, x3
