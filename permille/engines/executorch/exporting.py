"""Export a package as a program that ExecuTorch's runtime runs, sparse values as its input. Needs torch.

    layer = export_program(package, ProgramShape(variants=32, rows=64, tokens=128))
    write_manifest(package.blobs, package.manifest.with_addition(layer, {"weights": "float32"}))

float32 by the XNNPACK backend, or, of an int4 package, its 4-bit codes with activations in 8 bits. Scales are
then bfloat16, as XNNPACK has them, and linears whose rows are no multiple of the group stay float32. The
sparse values, attention, norms and the head are float32 either way.
"""

from enum import StrEnum

import numpy as np
import torch
from torch import nn

from permille.choices import choice_of
from permille.engines.dual.sparse import DualModel, dual_model
from permille.engines.executorch.program import ProgramShape
from permille.errors import InputError
from permille.package.limits import Role
from permille.package.manifest import Layer
from permille.package.reader import Package
from permille.quantization.types import QuantizedTensor, Scheme

# The form that a runtime calls, which writes into planned memory
_LIBRARY = torch.library.Library("permille", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "sparse_add.out(Tensor y_RTN, Tensor x_RTK, Tensor values_VC, Tensor variant_R, Tensor row_C, "
    "Tensor column_C, *, Tensor(a!) out) -> Tensor(a!)"
)


class Weights(StrEnum):
    """How a program holds the frozen weights."""

    FLOAT32 = "float32"
    INT4 = "int4"


BITS = {Weights.FLOAT32: 32, Weights.INT4: 8}
"""Of a linear layer's inputs."""


def export_program(
    package: Package, shape: ProgramShape, *, weights: Weights | str = Weights.FLOAT32
) -> Layer:
    """Store the program among the package's blobs; the model is in memory several times over meanwhile.

    Raises:
        InputError: no exporter is installed, a family that we do not know, or 4-bit weights of a package that
            is not int4.
    """
    weights = choice_of(Weights, weights, "weights of a program")
    try:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    except ModuleNotFoundError as exc:
        name = str(exc.name).partition(".")[0]
        raise InputError(f"exporting needs {name}: pip install 'permille[executorch]'") from exc
    module = dual_model(package)
    if weights is Weights.INT4:
        _set_codes(module, package)
    inputs = (
        torch.from_numpy(package.values()).repeat(shape.variants, 1),
        torch.zeros(shape.rows, dtype=torch.int64),
        torch.zeros(shape.rows, shape.tokens, dtype=torch.int64),
    )
    with torch.no_grad():
        lowered = to_edge_transform_and_lower(
            torch.export.export(module, inputs),
            partitioner=[XnnpackPartitioner()],
            # What is not one of torch's core operators: ours
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
            constant_methods={
                "package": torch.frombuffer(_digest(package), dtype=torch.uint8),
                "activation_bits": torch.tensor([BITS[weights]], dtype=torch.uint8),
            },
        )
    with package.blobs.writer() as writer:
        lowered.to_executorch().write_to_file(writer)
        return Layer(role=Role.PROGRAM, digest=writer.commit(), size_bytes=writer.size_bytes)


def _digest(package: Package) -> bytearray:
    return bytearray.fromhex(package.manifest.parent().digest.removeprefix("sha256:"))


def _set_codes(module: DualModel, package: Package) -> None:
    """Put the package's own codes, 0 at the mask, in place of decoded weights; sparse ones stay floats."""
    if package.manifest.scheme.name is not Scheme.INT4:
        raise InputError(f"expected an int4 package for 4-bit weights, got {package.manifest.scheme.name}")
    for info in package.manifest.tensors:
        layer = module.model.get_submodule(info.name.removesuffix("weight") + "linear")
        quantized = package.quantized(info.name)
        if isinstance(quantized, QuantizedTensor) and info.shape[1] % quantized.group_size == 0:
            layer.weight = nn.Parameter(_codes(quantized, package.mask(info.name)), requires_grad=False)


def _codes(quantized: QuantizedTensor, mask: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> torch.Tensor:
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
        IntxUnpackedToInt8Tensor,
        IntxUnpackedToInt8TensorActivationQuantization,
    )

    code = np.stack([quantized.packed >> 4, quantized.packed & 15], axis=1).reshape(-1)
    code_NK = (code.astype(np.int8) - np.int8(8))[: np.prod(quantized.shape)].reshape(quantized.shape)
    code_NK.reshape(-1)[mask] = 0
    scale_NG = torch.from_numpy(quantized.scales.copy())
    tensor: torch.Tensor = IntxUnpackedToInt8Tensor(
        qdata=torch.from_numpy(code_NK),
        scale=scale_NG,
        zero_point=torch.zeros_like(scale_NG, dtype=torch.int8),
        target_dtype=torch.int4,  # type: ignore[attr-defined]
        block_size=(1, quantized.group_size),
        dtype=torch.float32,
        activation_quantization=IntxUnpackedToInt8TensorActivationQuantization.INT8_ASYM_PER_TOKEN,
    )
    return tensor
