"""From a checked model folder and a mask to a package: the last step of a build, and of a notebook.

Tensor by tensor, so a model never has to fit into memory. The same folder, mask and description give the same
package: no clock is in it.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from permille.digests import JSON
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint, inside
from permille.models.families import scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.config_files import clean_config, config_bytes
from permille.package.direction_layers import write_basis, write_exponents
from permille.package.layers import (
    masked_values,
    write_dense,
    write_file,
    write_mask,
    write_plain,
    write_values,
)
from permille.package.limits import FILE_NAMES, MAX_FILE_BYTES, MEASUREMENTS
from permille.package.manifest import (
    Layer,
    Manifest,
    MaskInfo,
    ModelInfo,
    Quantization,
    TensorInfo,
    decimal_text,
    sort_layers,
)
from permille.package.writer import write_manifest
from permille.quantization import QuantizedTensor, Scheme, default_group_size, quantize
from permille.quantization.report import keep_of
from permille.tensors import RawTensor

Indices = Mapping[str, NDArray[np.uint32]]
_NONE = np.empty(0, np.uint32)


def pack_model(
    blobs: BlobFolder,
    checkpoint: Checkpoint,
    mask: Indices,
    *,
    method: str,
    density: float | str,
    scope: str = "all",
    scheme: Scheme = Scheme.NF4,
    group_size: int | None = None,
    mask_aware: bool = True,
    exponents: NDArray[np.int8] | None = None,
    basis: NDArray[np.int8] | None = None,
    provenance: Mapping[str, JSON] | None = None,
) -> str:
    """Quantize the model, take its masked values and write everything; returns the package's digest.

    Args:
        mask: strictly increasing flat indices by tensor; a tensor without any may be left out.
        method, density, scope: how the mask was chosen, for the manifest.
        group_size: None takes the scheme's default.
        mask_aware: leave masked weights out of their group's scale.
        exponents: [k] int8 in flat order, or none; see `permille.sensitivity.scores`.
        basis: [k, r] int8 in flat order, or none.

    Raises:
        InputError: a mask, exponents or a basis that do not fit, weights that are not finite, a file that is
            too large.
        PackageError: a file of the model may not be in a package.
        OSError: as the file system reports it.
    """
    group_size = default_group_size(scheme) if group_size is None else group_size
    tensors = _quantized(checkpoint, mask if mask_aware else {}, scheme, group_size)
    counts = mask_counts(checkpoint, mask)
    optional = []
    if exponents is not None:
        optional.append(write_exponents(blobs, exponents, counts))
    if basis is not None:
        optional.append(write_basis(blobs, basis, counts))
    return write_package(
        blobs,
        checkpoint,
        mask,
        layers=(
            write_dense(blobs, tensors, scheme),
            write_plain(blobs, plain_tensors(checkpoint)),
            write_mask(blobs, mask, [name for name, _ in scoped_tensors(checkpoint.config)]),
        ),
        optional=optional,
        scheme=Quantization(name=scheme, group_size=group_size, mask_aware=mask_aware),
        method=method,
        density=density,
        scope=scope,
        provenance=provenance,
    ).digest


def write_package(
    blobs: BlobFolder,
    checkpoint: Checkpoint,
    mask: Indices,
    *,
    layers: tuple[Layer, Layer, Layer],
    scheme: Quantization,
    method: str,
    density: float | str,
    scope: str = "all",
    optional: Sequence[Layer] = (),
    provenance: Mapping[str, JSON] | None = None,
) -> Manifest:
    """Write what is missing beside the dense, the plain and the mask layer: values, files, manifest.

    `optional`: an exponents layer, a basis layer, both or none.

    Raises:
        InputError, PackageError, OSError: as `pack_model`.
    """
    scoped = scoped_tensors(checkpoint.config)
    order = [name for name, _ in scoped]
    values = write_values(
        blobs, (masked_values(checkpoint.raw(name), mask.get(name, _NONE)) for name in order), order
    )
    files = list(_files(blobs, checkpoint))
    config = next(layer for layer in files if layer.path == "config.json")
    counts = mask_counts(checkpoint, mask)
    manifest = Manifest(
        model=ModelInfo(family=checkpoint.family.value, config=config.digest),
        scheme=scheme,
        mask=MaskInfo(
            method=method, density=decimal_text(float(density)), scope=scope, k=sum(counts.values())
        ),
        tensors=tuple(TensorInfo(name=name, shape=shape, count=counts[name]) for name, shape in scoped),
        layers=sort_layers([*layers, values, *optional, *files]),
        provenance=provenance or {},
    )
    write_manifest(blobs, manifest)
    return manifest


def mask_counts(checkpoint: Checkpoint, mask: Indices) -> dict[str, int]:
    """Masked weights by tensor, in tensor_id order, tensors without any included."""
    return {name: mask.get(name, _NONE).size for name, _ in scoped_tensors(checkpoint.config)}


def plain_tensors(checkpoint: Checkpoint) -> Iterator[RawTensor]:
    """All tensors that are not quantized, in the checkpoint's order."""
    scoped = {name for name, _ in scoped_tensors(checkpoint.config)}
    return (checkpoint.raw(name) for name in checkpoint.names if name not in scoped)


def _quantized(
    checkpoint: Checkpoint, mask: Indices, scheme: Scheme, group_size: int
) -> Iterator[tuple[str, QuantizedTensor]]:
    for name, shape in scoped_tensors(checkpoint.config):
        keep = keep_of(mask[name], shape) if name in mask else None
        yield name, quantize(checkpoint.float32(name), scheme, group_size, keep, name=name)


def _files(blobs: BlobFolder, checkpoint: Checkpoint) -> Iterator[Layer]:
    yield write_file(blobs, "config.json", config_bytes(clean_config(checkpoint.config)))
    for name in sorted(FILE_NAMES - {"config.json", MEASUREMENTS}):
        if (checkpoint.folder / name).exists():
            yield write_file(blobs, name, _read(checkpoint, name))


def _read(checkpoint: Checkpoint, name: str) -> bytes:
    path = inside(checkpoint.folder, name)
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise InputError(f"expected {name} of at most {MAX_FILE_BYTES} bytes, got {size}")
    return path.read_bytes()
