"""A package's model without our engines: dense in transformers, or in 4 bits by bitsandbytes.

The dense weights are the decoded codes with the sparse values in place, so a dense model computes the same as
our engines. It is the fastest dense form in torch: no padding, a head that computes only positions that
predict a target, and matrices that are reordered once for oneDNN, if it supports that.

# Legend: B sequences, T tokens, R targets, H hidden size, D vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from permille.package.reader import Package
from permille.quantization import dequantize
from permille.zo.estimators import Batch
from permille_lab.measuring.transformers_folder import link_transformers_folder


def dense_model(package: Package, *, prepacked: bool) -> Any:
    """Return the package's model in float32, with the sparse values in place.

    The model is created without memory and filled tensor by tensor.

    Args:
        prepacked: reorder matrices once for oneDNN, instead of in every product. They cannot be changed
            afterwards.
    """
    config = CONFIG_MAPPING[package.config["model_type"]].from_dict(dict(package.config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    values = torch.from_numpy(package.values())
    start = 0
    for info in package.manifest.tensors:
        weight = torch.from_numpy(dequantize(package.quantized(info.name)))
        indices = torch.from_numpy(package.mask(info.name).astype("int64"))
        weight.view(-1)[indices] = values[start : start + info.count]
        start += info.count
        _place(model, info.name, weight, prepacked=prepacked)
    for name in package.plain_names:
        _place(model, name, torch.from_numpy(package.plain(name).float32().copy()), prepacked=prepacked)
    if config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    # A checkpoint has no rotary frequencies. Only a new module computes them, outside the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model.eval().requires_grad_(False)


def bitsandbytes_model(package: Package, folder: Path) -> Any:
    """Return the package's model in 4 bits by bitsandbytes, without sparse values.

    bitsandbytes leaves embedding, head and norms in their stored dtype, whatever `dtype` says. They are
    converted to float32, because a CPU would emulate a bf16 head.
    """
    link_transformers_folder(package, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.float()
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float32
    return model


def batch_loss(model: Any, batch: Batch) -> float:
    """Return the mean loss over the batch's targets. Only their logits are computed."""
    with torch.no_grad():
        return float(mean_loss(model, batch))


def mean_loss(model: Any, batch: Batch) -> Tensor:
    """Return the loss of `batch_loss` as a tensor, which may have a gradient."""
    ids_BT = torch.from_numpy(batch.input_ids_BT)
    target_BT = torch.from_numpy(batch.target_BT)
    hidden_BTH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    hidden_RH = hidden_BTH[:, :-1][target_BT[:, 1:]]
    logit_RD = model.get_output_embeddings()(hidden_RH).float()
    return functional.cross_entropy(logit_RD, ids_BT[target_BT])


class PrepackedLinear(nn.Module):
    """A linear with its weight in the layout of oneDNN. A weight that cannot be reordered stays as it is."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self.weight = weight_NK
        self.reordered = True
        try:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK, None)
        except RuntimeError:  # this processor lacks the instructions, or this torch lacks oneDNN
            self.reordered = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        if not self.reordered:
            return functional.linear(x, self.weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product


def _place(model: Any, name: str, weight: Tensor, *, prepacked: bool) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if prepacked and isinstance(module, nn.Linear):
        model.set_submodule(path, PrepackedLinear(weight, None))
    else:
        setattr(module, leaf, nn.Parameter(weight, requires_grad=False))
