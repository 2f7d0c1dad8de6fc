"""Checks of a package's layers against its manifest and config."""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.errors import PackageError
from permille.models.families import expected_tensors, scoped_tensors, table_names
from permille.package.layers import (
    MINIMA,
    QUANT_MAP,
    QUANT_STATE,
    Layout,
    dense_layout,
    quant_state,
    table_shape,
)
from permille.package.limits import PROGRAM_HEADER_BYTES, Role
from permille.package.manifest import Manifest
from permille.package.safetensors_io import SafetensorsFile
from permille.quantization.nf4 import NF4_CODES
from permille.quantization.types import QuantizedTensor, Scheme, bits_of
from permille.tensors import Q8_0_WEIGHTS

# FORMAT 4.11: a u32 that is skipped, the magic, and four integers, little-endian.
_PROGRAM_HEADER = struct.Struct("<4x8sIQQQ")


def check_shapes(
    manifest: Manifest, config: Mapping[str, Any], layers: Mapping[Role, SafetensorsFile]
) -> None:
    """Check that names and shapes are exactly those that the config requires (FORMAT 4.8).

    Raises:
        PackageError: `tensor-names`, `tensor-shape` or `header-dtype`.
    """
    scoped = tuple((tensor.name, tensor.shape) for tensor in manifest.tensors)
    # The order must match, too. It defines the tensor_id, from which the random directions are computed.
    if scoped != scoped_tensors(config):
        raise PackageError(
            "tensor-shape", "The tensors of the manifest are not the linear layers of config.json, in order."
        )
    quantized = dict(scoped)
    plain: dict[str, tuple[int, ...]] = {
        name: shape for name, shape in expected_tensors(config).items() if name not in quantized
    }
    for name in (name for name, spec in layers[Role.PLAIN].specs.items() if spec.dtype == "U8"):
        if name not in table_names(config) or plain.get(name, (0, 1))[-1] % Q8_0_WEIGHTS:
            raise PackageError(
                "header-dtype",
                f"{name} must not be U8. Only an embedding or head whose rows have a multiple of 32 weights "
                "may be U8.",
            )
        plain[name] = table_shape(plain[name])
    counts: dict[str, tuple[int, ...]] = {tensor.name: (tensor.count,) for tensor in manifest.tensors}
    dense = _dense_layout(manifest, layers[Role.DENSE])
    expected: dict[Role, Mapping[str, tuple[int, ...]]] = {
        Role.DENSE: {name: shape for name, (_, shape) in dense.items()},
        Role.PLAIN: plain,
    }
    if manifest.adapter is not None:
        rank = manifest.adapter.rank
        expected[Role.ADAPTER] = {t.name: (rank, t.shape[1]) for t in manifest.tensors if t.count}
    for role in (Role.MASK, Role.VALUES):
        if role in layers:
            expected[role] = counts
    for role, shapes in expected.items():
        _check_layer_shapes(role, layers[role], shapes)
    # Names and shapes have been checked above, so each lookup succeeds.
    for name, (dtype, _) in dense.items():
        if (got := layers[Role.DENSE].specs[name].dtype) != dtype:
            raise PackageError("header-dtype", f"expected dtype {dtype} of {name}, got {got}")


def _dense_layout(manifest: Manifest, dense: SafetensorsFile) -> Layout:
    scheme, group_size = manifest.scheme.name, manifest.scheme.group_size
    found: Layout = {}
    for tensor in manifest.tensors:
        # With SOURCE, the bits of each tensor, and whether it has minima, follow from the layer itself.
        spec = dense.specs.get(tensor.name)
        is_eight = scheme is Scheme.SOURCE and spec is not None and spec.dtype == "I8"
        has_minima = not is_eight and tensor.name + MINIMA in dense.specs
        bits = 8 if is_eight else bits_of(scheme)
        layout = dense_layout(scheme, tensor.shape, group_size, bits=bits, has_minima=has_minima)
        found |= {tensor.name + suffix: stored for suffix, stored in layout.items()}
    return found


def _check_layer_shapes(role: Role, layer: SafetensorsFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if layer.specs.keys() != shapes.keys():
        other = sorted(layer.specs.keys() ^ shapes.keys())
        raise PackageError(
            "tensor-names", f"The tensors of the layer {role} are not those of config.json: {other!r:.200}"
        )
    for name, shape in shapes.items():
        if layer.specs[name].shape != shape:
            got = layer.specs[name].shape
            raise PackageError("tensor-shape", f"expected shape {shape} of {name} in {role}, got {got}")


def check_indices(name: str, indices: NDArray[np.uint32], weights: int) -> None:
    """Check that the indices of a weight increase strictly and are in range (FORMAT 4.4).

    Raises:
        PackageError: `mask-order` or `mask-range`.
    """
    if np.any(indices[1:] <= indices[:-1]):
        raise PackageError("mask-order", f"expected strictly increasing indices of {name}")
    if indices.size and int(indices[-1]) >= weights:
        raise PackageError(
            "mask-range", f"expected indices of {name} below {weights}, got {int(indices[-1])}"
        )


def check_scales(name: str, scheme: Scheme, scales: NDArray[np.float32]) -> None:
    """Check that scales are finite. Scales of schemes other than SOURCE must not be negative (FORMAT
    4.2).

    Raises:
        PackageError: `dense-scales`.
    """
    if scheme is Scheme.SOURCE:
        if not np.isfinite(scales).all():
            raise PackageError("dense-scales", f"The scales or minima of {name} are not all finite.")
        return
    # A NaN fails both comparisons.
    if not np.all((scales >= 0) & (scales < np.inf)):
        raise PackageError("dense-scales", f"A scale of {name} is negative, NaN or infinite.")


def check_codes(name: str, tensor: QuantizedTensor) -> None:
    """Check that codes are valid for the scheme, and that the padding after an odd number of four-bit
    codes is 0 (FORMAT 4.2).

    Raises:
        PackageError: `dense-codes` or `dense-padding`.
    """
    if tensor.scheme is Scheme.INT8:
        # FORMAT 4.2: codes are symmetric, from -127 to 127.
        if int(tensor.packed.view(np.int8).min()) == -128:
            raise PackageError("dense-codes", f"expected codes of {name} from -127, got -128")
    elif math.prod(tensor.shape) % 2 and tensor.packed[-1] & 0x0F:
        raise PackageError("dense-padding", f"The unused half of the last byte of {name} is not 0.")


def check_program(path: Path) -> None:
    """Check that the header of a program is valid. It describes a file of two sections: first the
    description of the program, then its data segments (FORMAT 4.11).

    Raises:
        PackageError: `program-header`.
    """
    with path.open("rb") as file:
        head = file.read(PROGRAM_HEADER_BYTES)
    magic, length, described, base, segments = _PROGRAM_HEADER.unpack(head)
    found, expected = (magic, length, base + segments), (b"ET12eh00", 32, path.stat().st_size)
    if found != expected or not PROGRAM_HEADER_BYTES <= described <= base:
        raise PackageError(
            "program-header",
            f"The header of the program holds {found} instead of {expected}, or a description of {described} "
            f"bytes instead of {PROGRAM_HEADER_BYTES} to {base}.",
        )


def check_code_book(dense: SafetensorsFile, name: str, shape: tuple[int, int], group_size: int) -> None:
    """Check that an NF4 weight has the one valid table and quantization state (FORMAT 4.2).

    Raises:
        PackageError: `dense-code-book`.
    """
    state = dense.tensor(name + QUANT_STATE).data.tobytes()
    code_book = dense.tensor(name + QUANT_MAP).data.tobytes()
    if state != quant_state(shape, group_size) or code_book != NF4_CODES.astype("<f4").tobytes():
        raise PackageError(
            "dense-code-book", f"The table or the state beside {name} is not that of NF4 for {shape}."
        )
