"""Export of a package as a program of ExecuTorch, with the sparse values as its input. Needs torch.

    layer = export_program(package, ProgramShape(variants=32, rows=64, tokens=128))
    write_manifest(package.blobs, package.manifest.with_program(layer, {"weights": "float32"}))

The program reads the frozen weights once for all variants (as in P-RGE, section 3.4, but with the sparse
values instead of LoRA's B). As for every engine, the caller perturbs the values. `sparse_add` is a separate
operator, so that a runtime can replace it by another implementation.

The XNNPACK backend computes in float32. For an int4 package, it can also compute with the 4-bit codes and
8-bit activations. In this case, scales are rounded to bfloat16, which XNNPACK needs, and linear layers whose
row length is not a multiple of the group size stay float32. Sparse values, attention, norms and head are
float32 in both cases.

# Legend: V variants, R rows of the pass (each row is a sequence with the values of one variant), T tokens, K
# and N inputs and outputs of a linear layer, C its masked weights. In `values_VK` alone, K is the number of
# masked weights of the whole package.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from permille.choices import ProgramWeights, choice_of
from permille.engines.executorch.program import ProgramShape
from permille.engines.export import checked_values, merged_tensors, new_folder
from permille.errors import InputError
from permille.extras import install_line
from permille.files import write_atomic
from permille.models.layerwise import transformers_config
from permille.package.limits import Role
from permille.package.manifest import Layer
from permille.package.reader import Package
from permille.quantization.types import QuantizedTensor, Scheme

# The form of `sparse_add` that a runtime calls. It writes to memory that the exporter has planned.
_LIBRARY = torch.library.Library("permille", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "sparse_add.out(Tensor y_RTN, Tensor x_RTK, Tensor values_VC, Tensor variant_R, Tensor row_C, "
    "Tensor column_C, *, Tensor(a!) out) -> Tensor(a!)"
)


MAX_TOKENS = 512
"""The largest number of tokens that `model.pte` takes, if the model's positions set no lower limit. The
program reserves memory for this many tokens."""
BITS = {ProgramWeights.FLOAT32: 32, ProgramWeights.INT4: 8}
"""Number of bits of a linear layer's inputs, for each kind of weights of a program."""


def export_program(
    package: Package, shape: ProgramShape, *, weights: ProgramWeights | str = ProgramWeights.FLOAT32
) -> Layer:
    """Store a program among the package's blobs. The export takes several times the memory of the model.

    Raises:
        InputError: no exporter is installed, the family is unknown, the package has an adapter, or 4-bit
            weights are requested and the package is not int4.
    """
    weights = choice_of(ProgramWeights, weights, "weights of a program")
    if weights is ProgramWeights.INT4 and package.manifest.scheme.name is not Scheme.INT4:
        raise InputError(
            f"4-bit weights need an int4 package, and this one is {package.manifest.scheme.name}."
        )
    _check_exporter()
    module = dual_model(package)
    if weights is ProgramWeights.INT4:
        _set_codes(module, package)
    inputs = (
        torch.from_numpy(package.values()).repeat(shape.variants, 1),
        torch.zeros(shape.rows, dtype=torch.int64),
        torch.zeros(shape.rows, shape.tokens, dtype=torch.int64),
    )
    with torch.no_grad():
        exported = torch.export.export(module, inputs)
    constants = {
        # The engine compares this digest, so a program never runs with the values of another package.
        "package": torch.frombuffer(_digest(package), dtype=torch.uint8),
        "activation_bits": torch.tensor([BITS[weights]], dtype=torch.uint8),
    }
    with package.blobs.writer() as writer:
        _lower(exported, constants).write_to_file(writer)
        return Layer(role=Role.PROGRAM, digest=writer.commit(), size_bytes=writer.size_bytes)


def export_executorch(package: Package, values_K: NDArray[np.float32] | None, folder: Path) -> int:
    """Write a folder with `model.pte`, config and tokenizer, for any ExecuTorch runtime with XNNPACK.

    The values are float32 constants of the program. An adapter is merged into the weights. The method
    `forward` takes token ids I64 [1, T] and returns logits F32 [1, T, vocabulary]. T is from 2 to
    `MAX_TOKENS`, or to the model's positions if these are fewer.

    Returns:
        The size of `model.pte`.

    Raises:
        InputError: no exporter is installed, the family is unknown, the values have another shape or dtype or
            are not finite, or the folder is not empty.
    """
    _check_exporter()
    values_K = checked_values(package, values_K)
    most = min(MAX_TOKENS, int(package.config.get("max_position_embeddings") or MAX_TOKENS))
    # The minimum is 2, because torch.export treats a size of 0 or 1 as a constant.
    tokens = torch.export.Dim("tokens", min=2, max=most)
    inputs = (torch.zeros(1, most, dtype=torch.int64),)
    # Open the folder first, because the export of a large model takes minutes.
    with new_folder(folder) as temporary:
        module = _Logits(_float32_model(package, values_K)).eval()
        with torch.no_grad():
            exported = torch.export.export(module, inputs, dynamic_shapes=({1: tokens},))
        for name in package.manifest.files():
            write_atomic(temporary / name, package.file(name))
        with (temporary / "model.pte").open("wb") as file:
            _lower(exported, {}).write_to_file(file)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()


@torch.library.custom_op("permille::sparse_add", mutates_args=())
def sparse_add(
    y_RTN: Tensor, x_RTK: Tensor, values_VC: Tensor, variant_R: Tensor, row_C: Tensor, column_C: Tensor
) -> Tensor:
    """Return `y_r + x_r S_v^T`, where v is the variant of row r.

    S_v has `values_v` at (row, column), and is 0 elsewhere.
    """
    # Each row takes the values of its variant.
    product_RTC = x_RTK[..., column_C] * values_VC[variant_R, None]
    return y_RTN.index_add(2, row_C, product_RTC)


@sparse_add.register_fake
def _(y_RTN: Tensor, *_others: Tensor) -> Tensor:
    return torch.empty_like(y_RTN)


class DualSparseLinear(nn.Module):
    """`y_v = x_v W_v^T + b` for each variant v.

    The stored weight is 0 at the mask. There, each variant adds its own values (ADR 12).
    """

    def __init__(self, linear: nn.Linear, mask_C: NDArray[np.uint32]) -> None:
        """Wrap a linear layer whose weight is 0 at the mask. `mask_C` has flat indices."""
        super().__init__()
        flat_C = torch.from_numpy(mask_C.astype(np.int64))
        self.linear = linear
        self.values = nn.Parameter(torch.zeros(1, len(flat_C)), requires_grad=False)
        self.register_buffer("variant_R", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("row_C", flat_C // linear.in_features)
        self.register_buffer("column_C", flat_C % linear.in_features)
        self.variant_R: Tensor
        self.row_C: Tensor
        self.column_C: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map [R, T, K], or [R * T, K] for OPT. The caller replaces `values` [V, C] and `variant_R`."""
        y: Tensor = self.linear(x)
        x_RTK, y_RTN = (tensor.reshape(len(self.variant_R), -1, tensor.shape[-1]) for tensor in (x, y))
        added: Tensor = sparse_add(y_RTN, x_RTK, self.values, self.variant_R, self.row_C, self.column_C)
        return added.view(y.shape)


class DualModel(nn.Module):
    """Token losses of a package under several variants of the sparse values."""

    def __init__(self, package: Package, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._counts = list(package.counts)
        self._paths = [info.name.removesuffix(".weight") for info in package.manifest.tensors]

    def forward(self, values_VK: Tensor, variant_R: Tensor, ids_RT: Tensor) -> Tensor:
        """Return `-log p(token t + 1 | tokens to t)` of each row under its variant, float32 [R, T - 1]."""
        values = torch.split(values_VK, self._counts, dim=1)
        # The values are inputs of the program. All other parameters become its constants.
        replaced = {f"{path}.values": part for path, part in zip(self._paths, values, strict=True)}
        replaced |= {f"{path}.variant_R": variant_R for path in self._paths}
        logits = functional_call(self.model, replaced, (ids_RT,), {"use_cache": False}).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), ids_RT[:, 1:].flatten(), reduction="none")
        return loss.view(len(ids_RT), -1)


def dual_model(package: Package) -> DualModel:
    """Build the module of a program in float32, with every linear layer decoded.

    Raises:
        InputError: the family is unknown, attention is not causal, or the package has an adapter.
    """
    if package.manifest.adapter is not None:
        raise InputError("A program needs a package with a mask, and this one has an adapter.")
    model = _float32_model(package, np.zeros(package.k, np.float32))
    for info in package.manifest.tensors:
        path = info.name.removesuffix(".weight")
        linear: Any = model.get_submodule(path)
        model.set_submodule(path, DualSparseLinear(linear, package.mask(info.name)))
    return DualModel(package, model).eval()


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor) -> Tensor:
        logits: Tensor = self.model(ids_BT, use_cache=False).logits
        return logits


def _float32_model(package: Package, values_K: NDArray[np.float32]) -> nn.Module:
    """Build the model of transformers with these values merged into its weights."""
    config = transformers_config(package.config)
    state = {name: torch.tensor(array) for name, array in merged_tensors(package, values_K)}
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # transformers shows a progress bar even for a state that is in memory
    try:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, attn_implementation="eager"
        )
    finally:
        if shown:
            logging.enable_progress_bar()
    found: nn.Module = model.requires_grad_(False)
    return found


def _check_exporter() -> None:
    try:
        import executorch.exir  # noqa: F401
    except ModuleNotFoundError as exc:
        name = str(exc.name).partition(".")[0]
        raise InputError(f"Exporting needs {name}. Run {install_line('executorch')}.") from exc


def _lower(exported: torch.export.ExportedProgram, constants: Mapping[str, Tensor]) -> Any:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    lowered = to_edge_transform_and_lower(
        exported,
        partitioner=[XnnpackPartitioner()],
        # Skip the check that every operator is one of torch's core operators, because `sparse_add` is not.
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
        constant_methods=dict(constants),
    )
    return lowered.to_executorch()


def _digest(package: Package) -> bytearray:
    return bytearray.fromhex(package.manifest.parent().digest.removeprefix("sha256:"))


def _set_codes(module: DualModel, package: Package) -> None:
    """Replace decoded weights by the package's own codes, with 0 at the mask."""
    for info in package.manifest.tensors:
        layer = module.model.get_submodule(info.name.removesuffix("weight") + "linear")
        quantized = package.quantized(info.name)
        if info.shape[1] % quantized.group_size == 0:
            layer.weight = nn.Parameter(_codes(quantized, package.mask(info.name)), requires_grad=False)


def _codes(quantized: QuantizedTensor, mask: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> Tensor:
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
        IntxUnpackedToInt8Tensor,
        IntxUnpackedToInt8TensorActivationQuantization,
    )

    code = np.stack([quantized.packed >> 4, quantized.packed & 15], axis=1).reshape(-1)
    code_NK = (code.astype(np.int8) - np.int8(8))[: np.prod(quantized.shape)].reshape(quantized.shape)
    # A code of 0 stands for a weight of 0. So the product leaves out the masked weights, and `sparse_add`
    # adds the values of each variant.
    code_NK.reshape(-1)[mask] = 0
    scale_NG = torch.from_numpy(quantized.scales.copy())
    tensor: Tensor = IntxUnpackedToInt8Tensor(
        qdata=torch.from_numpy(code_NK),
        scale=scale_NG,
        zero_point=torch.zeros_like(scale_NG, dtype=torch.int8),
        target_dtype=torch.int4,  # type: ignore[attr-defined]
        block_size=(1, quantized.group_size),
        dtype=torch.float32,
        activation_quantization=IntxUnpackedToInt8TensorActivationQuantization.INT8_ASYM_PER_TOKEN,
    )
    return tensor
