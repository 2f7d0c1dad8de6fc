"""A Llama forward pass in plain torch for training, its parameters named as transformers names them.

Written for speed on a processor: no module hooks, fused attention, one row of cosines. The exported folder is
read by `LlamaForCausalLM`; a test holds the two to the same losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

THETA = 10000.0
EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int = 4096
    hidden: int = 256
    intermediate: int = 704
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    tied: bool = False

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        """Arguments of transformers' `LlamaConfig`."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 512,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": EPSILON,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }


def initial(shape: Shape, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """Fresh parameters; what writes into the residual stream begins at zero: each layer begins as none."""
    rng = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=rng) * scale

    wide, kv = shape.hidden, shape.kv_heads * shape.head
    parameters = {"model.embed_tokens.weight": drawn(shape.vocabulary, wide, 0.02 if shape.tied else 0.5)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        parameters[at + "input_layernorm.weight"] = torch.ones(wide)
        parameters[at + "self_attn.q_proj.weight"] = drawn(wide, wide, wide**-0.5)
        parameters[at + "self_attn.k_proj.weight"] = drawn(kv, wide, wide**-0.5)
        parameters[at + "self_attn.v_proj.weight"] = drawn(kv, wide, wide**-0.5)
        parameters[at + "self_attn.o_proj.weight"] = torch.zeros(wide, wide)
        parameters[at + "post_attention_layernorm.weight"] = torch.ones(wide)
        parameters[at + "mlp.gate_proj.weight"] = drawn(shape.intermediate, wide, wide**-0.5)
        parameters[at + "mlp.up_proj.weight"] = drawn(shape.intermediate, wide, wide**-0.5)
        parameters[at + "mlp.down_proj.weight"] = torch.zeros(wide, shape.intermediate)
    parameters["model.norm.weight"] = torch.ones(wide)
    if not shape.tied:
        parameters["lm_head.weight"] = torch.zeros(shape.vocabulary, wide)
    return {name: value.to(device).requires_grad_() for name, value in parameters.items()}


def rotation(length: int, head: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (length, head), both halves alike (transformers' order in a head)."""
    frequency = THETA ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency[None, :]
    both = torch.cat([angle, angle], dim=1).to(device)
    return both.cos(), both.sin()


def loss(parameters: dict[str, Tensor], shape: Shape, tokens: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Mean next-token loss (nats) of windows.

    Args:
        tokens: (B, T + 1) int64; the last column is only a target.
        turn: `rotation(T, shape.head)`.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = F.embedding(inputs, parameters["model.embed_tokens.weight"])
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        x = x + _attention(
            parameters, at + "self_attn.", shape, _norm(x, parameters[at + "input_layernorm.weight"]), turn
        )
        x = x + _mlp(parameters, at + "mlp.", _norm(x, parameters[at + "post_attention_layernorm.weight"]))
    x = _norm(x, parameters["model.norm.weight"])
    head = parameters["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    logits = F.linear(x, head).float()
    return F.cross_entropy(logits.view(-1, shape.vocabulary), targets.reshape(-1))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def _attention(
    parameters: dict[str, Tensor], at: str, shape: Shape, x: Tensor, turn: tuple[Tensor, Tensor]
) -> Tensor:
    rows, length, _ = x.shape

    def heads(name: str, count: int) -> Tensor:
        return F.linear(x, parameters[at + name]).view(rows, length, count, shape.head).transpose(1, 2)

    q = _turn(heads("q_proj.weight", shape.heads), turn)
    k = _turn(heads("k_proj.weight", shape.kv_heads), turn)
    v = heads("v_proj.weight", shape.kv_heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
    return F.linear(
        mixed.transpose(1, 2).reshape(rows, length, shape.hidden), parameters[at + "o_proj.weight"]
    )


def _turn(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]


def _mlp(parameters: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate = F.silu(F.linear(x, parameters[at + "gate_proj.weight"]))
    return F.linear(
        gate * F.linear(x, parameters[at + "up_proj.weight"]), parameters[at + "down_proj.weight"]
    )
