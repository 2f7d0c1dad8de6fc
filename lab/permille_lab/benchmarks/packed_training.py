"""First-order training on a package's 4-bit base in torch: the thriftiest form that we could write.

Weights stay packed and mapped. A layer decodes its matrix into one shared buffer, forward and again
backward, with the sparse values in place; no dense model exists. Gradients go to adapters (peft wraps these
layers as it wraps any linear one) or to the sparse values themselves. bitsandbytes does the same with a CPU
backward pass that is tens of times slower.

# Legend: N, K = out and in features; C masked weights of a layer; M tokens.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from permille.native.weights import PackedRows, dequantize_rows
from permille.package.reader import Package

_BLOCK_TOKENS = 4096


class Buffer:
    """One matrix of scratch that all layers share, one after the other."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def matrix(self, shape: tuple[int, int]) -> Tensor:
        """[N, K] float32, valid until the next call."""
        size = shape[0] * shape[1]
        if self._flat.numel() < size:
            self._flat = torch.empty(size)
        return self._flat[:size].view(shape)


class PackedLinear(nn.Linear):
    """A linear layer whose weight is packed: what peft and autograd see is its product alone."""

    def __init__(self, rows: PackedRows, indices: Tensor, values_C: Tensor, buffer: Buffer) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = rows.shape
        # peft reads the device and the dtype of a layer from its weight.
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_parameter("bias", None)
        self._rows = rows
        self._buffer = buffer
        self.indices = indices
        self.values_C = values_C

    def forward(self, x: Tensor) -> Tensor:
        """x W^T: layers of Llama have no bias."""
        product: Tensor = _PackedProduct.apply(x, self.values_C, self)  # type: ignore[no-untyped-call]
        return product

    def matrix(self, values_C: Tensor) -> Tensor:
        """The dense matrix [N, K], in the shared buffer."""
        weight_NK = self._buffer.matrix(self._rows.shape)
        dequantize_rows(self._rows, 0, self.out_features, weight_NK.numpy())
        weight_NK.view(-1)[self.indices] = values_C
        return weight_NK


class _PackedProduct(torch.autograd.Function):
    """`x W^T`, W decoded in both passes; its gradients by x and by the values on the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values_C: Tensor, layer: PackedLinear) -> Tensor:
        ctx.save_for_backward(x, values_C)
        ctx.layer = layer
        return x @ layer.matrix(values_C.detach()).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, values_C = ctx.saved_tensors
        layer, (gradient,) = ctx.layer, gradients
        by_x = by_values = None
        if ctx.needs_input_grad[0]:
            by_x = gradient @ layer.matrix(values_C.detach())
        if ctx.needs_input_grad[1]:
            row_C, column_C = layer.indices // layer.in_features, layer.indices % layer.in_features
            gradient_MN, x_MK = gradient.flatten(0, -2), x.flatten(0, -2)
            by_values = (gradient_MN[:, row_C] * x_MK[:, column_C]).sum(0)
        return by_x, by_values, None


class StoredEmbedding(nn.Embedding):
    """Looks up in the table as stored and widens what it found."""

    def forward(self, ids: Tensor) -> Tensor:
        """[..., H] float32."""
        return functional.embedding(ids, self.weight).float()


class StoredHead(nn.Linear):
    """Multiplies with the table as stored, widened a block at a time, and again for the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        product: Tensor = _HeadProduct.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return product


class _HeadProduct(torch.autograd.Function):
    """`x W^T`, block by block of the vocabulary: no float32 copy of the head exists."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return torch.cat([x @ block.float().T for block in torch.split(weight, _BLOCK_TOKENS)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = torch.split(gradients[0], _BLOCK_TOKENS, dim=-1)
        blocks = torch.split(ctx.weight, _BLOCK_TOKENS)
        by_x = parts[0] @ blocks[0].float()
        for part, block in zip(parts[1:], blocks[1:], strict=True):
            by_x += part @ block.float()
        return by_x, None


def packed_model(package: Package) -> tuple[Any, nn.Parameter]:
    """A causal model of transformers over the package, and its sparse values [k] as one parameter.

    Llama only. The parameter has no gradient until it is asked to (`requires_grad_`).
    """
    config = CONFIG_MAPPING[package.config["model_type"]].from_dict(dict(package.config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    values_K = nn.Parameter(torch.from_numpy(package.values()), requires_grad=False)
    buffer = Buffer()
    start = 0
    for info in package.manifest.tensors:
        path = info.name.removesuffix(".weight")
        indices = torch.from_numpy(package.mask(info.name).astype(np.int64))
        part_C = values_K[start : start + info.count]
        rows = PackedRows.of(package.quantized(info.name))
        model.set_submodule(path, PackedLinear(rows, indices, part_C, buffer))
        start += info.count
    for name in package.plain_names:
        path, _, leaf = name.rpartition(".")
        raw = package.plain(name)
        stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[raw.dtype]
        tensor = torch.from_numpy(np.array(raw.data)).view(stored).view(raw.shape)
        setattr(model.get_submodule(path), leaf, nn.Parameter(tensor, requires_grad=False))
    model.model.norm.float()
    for layer in model.model.layers:
        layer.input_layernorm.float()
        layer.post_attention_layernorm.float()
    _keep_tables_stored(model)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model.eval().requires_grad_(False), values_K


def bind_values(model: Any, values_K: nn.Parameter) -> None:
    """Point the layers at slices of the parameter again, so that a gradient flows to it."""
    start = 0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            count = len(module.indices)
            module.values_C = values_K[start : start + count]
            start += count


def _keep_tables_stored(model: Any) -> None:
    embedding = model.get_input_embeddings()
    table = embedding.weight
    embedding.__class__ = StoredEmbedding
    head = model.get_output_embeddings()
    if model.config.tie_word_embeddings:
        head.weight = table
    head.__class__ = StoredHead
