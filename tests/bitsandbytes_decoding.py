"""Decode a 4-bit layer of bitsandbytes correctly, also on machines with AVX-512."""

import copy

import bitsandbytes
import torch


def decoded(layer: bitsandbytes.nn.Linear4bit) -> torch.Tensor:
    """Return the weights of a layer, decoded as one row.

    With AVX-512, bitsandbytes 0.50.2 reads the scale of a wrong block if the length of a row is not a
    multiple of the block size. This also happens to tensors that it has quantized itself. One long row is
    decoded correctly (ADR 13).
    """
    state = copy.copy(layer.weight.quant_state)
    shape, state.shape = state.shape, torch.Size([1, state.shape.numel()])
    flat: torch.Tensor = bitsandbytes.functional.dequantize_4bit(layer.weight.data, state)
    return flat.reshape(shape)
