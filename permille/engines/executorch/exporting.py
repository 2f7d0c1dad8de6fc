"""Export a package as one file that ExecuTorch's runtime runs, sparse values as its input. Needs torch.

    export_program(package, Path("program.pte"), ProgramShape(variants=32, rows=64, tokens=128))

float32 by the XNNPACK backend, or, of an int4 package, its 4-bit codes with activations in 8 bits. Scales are
then bfloat16, as XNNPACK has them, and linears whose rows are no multiple of the group stay float32. The
sparse values, attention, norms and the head are float32 either way.
"""

import argparse
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from torch import nn

from permille.choices import choice_of
from permille.engines.dual.sparse import DualModel, dual_model
from permille.engines.executorch.program import ProgramShape, program_name
from permille.errors import InputError
from permille.files import write_atomic
from permille.package.blobs import BlobFolder
from permille.package.reader import Package, verify_package
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
    package: Package, path: Path, shape: ProgramShape, *, weights: Weights | str = Weights.FLOAT32
) -> None:
    """Write the program; the model is in memory several times over while it is made.

    Raises:
        InputError: no exporter is installed, a family that we do not know, or 4-bit weights of a package that
            is not int4.
    """
    weights = choice_of(Weights, weights, "weights of a program")
    try:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    except ModuleNotFoundError as exc:
        raise InputError(f"exporting needs {exc.name}: pip install 'permille[executorch]'") from exc
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
    write_atomic(path, lowered.to_executorch().buffer)


def _digest(package: Package) -> bytearray:
    return bytearray.fromhex(package.digest.removeprefix("sha256:"))


def _set_codes(module: DualModel, package: Package) -> None:
    """Put the package's own codes, 0 at the mask, in the place of decoded weights."""
    if package.manifest.scheme.name is not Scheme.INT4:
        raise InputError(f"expected an int4 package for 4-bit weights, got {package.manifest.scheme.name}")
    for info in package.manifest.tensors:
        layer = module.model.get_submodule(info.name.removesuffix("weight") + "linear")
        quantized = package.quantized(info.name)
        if info.shape[1] % quantized.group_size == 0:
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


def main() -> None:
    """Export a package of a blob folder."""
    parser = argparse.ArgumentParser(
        prog="python -m permille.engines.executorch.exporting", description=__doc__
    )
    parser.add_argument(
        "--blobs", type=Path, required=True, help="folder of blobs: the service's, a device's"
    )
    parser.add_argument("--package", required=True, help="sha256:...")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder; the file is <digits of the package>.pte"
    )
    parser.add_argument("--weights", choices=list(Weights), default=Weights.FLOAT32.value)
    parser.add_argument("--variants", type=int, default=8, help="of the values, in one pass")
    parser.add_argument("--rows", type=int, default=16, help="sequences of all variants, in one pass")
    parser.add_argument("--tokens", type=int, default=128, help="longest row")
    options = parser.parse_args()
    shape = ProgramShape(variants=options.variants, rows=options.rows, tokens=options.tokens)
    package = verify_package(BlobFolder(options.blobs), options.package)
    path = options.out / program_name(package)
    export_program(package, path, shape, weights=options.weights)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
