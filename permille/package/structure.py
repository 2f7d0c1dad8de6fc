"""What the layers of a package must hold, by its manifest and its config."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from permille.errors import PackageError
from permille.models.families import expected_tensors, scoped_tensors
from permille.package.layers import ABSMAX, QUANT_MAP, QUANT_STATE, SCALES, quant_state
from permille.package.limits import PROGRAM_HEADER_BYTES, Role
from permille.package.manifest import Manifest
from permille.package.safetensors_io import SafetensorsFile
from permille.quantization.nf4 import NF4_CODES
from permille.quantization.types import Scheme, packed_size, scales_shape

_PROGRAM_HEADER = struct.Struct("<4x8sIQQQ")


def check_shapes(
    manifest: Manifest, config: Mapping[str, Any], layers: Mapping[Role, SafetensorsFile]
) -> None:
    """Names and shapes are those that the config asks for, no more and no fewer (FORMAT 4.8).

    Raises:
        PackageError: `tensor-names`, `tensor-shape` or `header-dtype`.
    """
    scoped = tuple((tensor.name, tensor.shape) for tensor in manifest.tensors)
    if scoped != scoped_tensors(config):
        raise PackageError(
            "tensor-shape", "expected manifest.tensors to be the config's linear layers, in order"
        )
    quantized = dict(scoped)
    plain: dict[str, tuple[int, ...]] = {
        name: shape for name, shape in expected_tensors(config).items() if name not in quantized
    }
    counts: dict[str, tuple[int, ...]] = {tensor.name: (tensor.count,) for tensor in manifest.tensors}
    expected: dict[Role, Mapping[str, tuple[int, ...]]] = {
        Role.DENSE: _dense_shapes(manifest),
        Role.PLAIN: plain,
    }
    if manifest.adapter is not None:
        rank = manifest.adapter.rank
        expected[Role.ADAPTER] = {t.name: (rank, t.shape[1]) for t in manifest.tensors if t.count}
    for role in (Role.MASK, Role.VALUES, Role.EXPONENTS):
        if role in layers:
            expected[role] = counts
    for role, shapes in expected.items():
        _check_layer_shapes(role, layers[role], shapes)


def _dense_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    scheme, group_size = manifest.scheme.name, manifest.scheme.group_size
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in manifest.tensors:
        packed, scales = packed_size(tensor.shape), scales_shape(scheme, tensor.shape, group_size)
        match scheme:
            case Scheme.INT4:
                shapes |= {tensor.name: (packed,), tensor.name + SCALES: scales}
            case Scheme.NF4:
                state = (len(quant_state(tensor.shape, group_size)),)
                shapes |= {tensor.name: (packed, 1), tensor.name + ABSMAX: scales}
                shapes |= {tensor.name + QUANT_MAP: (16,), tensor.name + QUANT_STATE: state}
            case other:
                assert_never(other)
    return shapes


def _check_layer_shapes(role: Role, layer: SafetensorsFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if layer.specs.keys() != shapes.keys():
        other = sorted(layer.specs.keys() ^ shapes.keys())
        raise PackageError(
            "tensor-names", f"expected the config's tensors in {role}, differs in {other!r:.200}"
        )
    for name, shape in shapes.items():
        if layer.specs[name].shape != shape:
            got = layer.specs[name].shape
            raise PackageError("tensor-shape", f"expected {shape} of {name} in {role}, got {got}")
        wanted = "F32" if name.endswith((ABSMAX, QUANT_MAP, SCALES)) else "U8"
        if role is Role.DENSE and layer.specs[name].dtype != wanted:
            raise PackageError("header-dtype", f"expected {wanted} of {name}, got {layer.specs[name].dtype}")


def check_indices(name: str, indices: NDArray[np.uint32], weights: int) -> None:
    """Indices of a weight with so many elements rise strictly and stay inside (FORMAT 4.4).

    Raises:
        PackageError: `mask-order` or `mask-range`.
    """
    if np.any(indices[1:] <= indices[:-1]):
        raise PackageError("mask-order", f"expected strictly increasing indices of {name}")
    if indices.size and int(indices[-1]) >= weights:
        raise PackageError(
            "mask-range", f"expected indices of {name} below {weights}, got {int(indices[-1])}"
        )


def check_scales(name: str, scales: NDArray[np.float32]) -> None:
    """Scales are finite and not negative (FORMAT 4.2).

    Raises:
        PackageError: `dense-scales`.
    """
    # NaN fails the comparison too.
    if not np.all((scales >= 0) & (scales < np.inf)):
        raise PackageError("dense-scales", f"expected finite scales of {name} from 0, got others")


def check_program(path: Path) -> None:
    """A program's header says what the file has: the description, and after it the segments (FORMAT 4.11).

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
            f"expected {expected} in a program, got {found}, {described} to {base}",
        )


def check_code_book(dense: SafetensorsFile, name: str, shape: tuple[int, int], group_size: int) -> None:
    """The table and the state beside an NF4 weight are the only ones there can be (FORMAT 4.2).

    Raises:
        PackageError: `dense-code-book`.
    """
    state = dense.tensor(name + QUANT_STATE).data.tobytes()
    code_book = dense.tensor(name + QUANT_MAP).data.tobytes()
    if state != quant_state(shape, group_size) or code_book != NF4_CODES.astype("<f4").tobytes():
        raise PackageError("dense-code-book", f"expected NF4's table and state of {shape} beside {name}")
