"""Decoding of a 4-bit layer by bitsandbytes, with AVX-512 and without."""

import copy

import bitsandbytes
import torch


def decoded(layer: bitsandbytes.nn.Linear4bit) -> torch.Tensor:
    """Weights of a layer, decoded as one row.

    bitsandbytes 0.50.2 with AVX-512 takes another block's scale where a row's length is no multiple of the
    block size, of tensors that it has quantized itself too; as one row they come out right (ADR 13).
    """
    state = copy.copy(layer.weight.quant_state)
    shape, state.shape = state.shape, torch.Size([1, state.shape.numel()])
    flat: torch.Tensor = bitsandbytes.functional.dequantize_4bit(layer.weight.data, state)
    return flat.reshape(shape)
