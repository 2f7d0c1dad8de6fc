"""The rules of a manifest (FORMAT 3): everything that it can be wrong about by itself, without a blob."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from permille.digests import is_digest
from permille.errors import PackageError
from permille.package.limits import (
    FILE_NAMES,
    FORMAT,
    GROUP_SIZES,
    MAX_BASIS_RANK,
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    MAX_K,
    MAX_LAYER_BYTES,
    MAX_TENSORS,
    MAX_WEIGHTS_OF_A_TENSOR,
    MEDIA_TYPES,
    OPTIONAL_ROLES,
    REQUIRED_ROLES,
    VERSION,
    Role,
)
from permille.quantization.types import Scheme, packed_size, scales_shape

if TYPE_CHECKING:
    from permille.package.manifest import Layer, Manifest


def check_manifest(manifest: "Manifest") -> None:
    """Check all rules of FORMAT 3.

    Raises:
        PackageError: the first that is broken.
    """
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        got = f"{manifest.format!r:.60} {manifest.version!r:.20}"
        raise PackageError("manifest-version", f"expected {FORMAT} version {VERSION}, got {got}")
    _check_words(manifest)
    _check_tensors(manifest)
    for layer in manifest.layers:
        _check_layer(layer)
    _check_layers(manifest)
    _check_sizes(manifest)


def _check_words(manifest: "Manifest") -> None:
    for text in (manifest.model.family, manifest.mask.method, manifest.mask.scope):
        if not re.fullmatch(r"[a-z0-9][a-z0-9_.:-]{0,63}", text, re.ASCII):
            raise PackageError("manifest-schema", f"expected a short lower-case word, got {text!r:.80}")
    if manifest.scheme.group_size not in GROUP_SIZES[manifest.scheme.name]:
        allowed = GROUP_SIZES[manifest.scheme.name]
        got = manifest.scheme.group_size
        raise PackageError("manifest-schema", f"expected a group size of {allowed}, got {got}")
    density = manifest.mask.density
    if not re.fullmatch(r"[0-9]\.[0-9]{1,20}|0|1", density, re.ASCII):
        raise PackageError("manifest-schema", f"expected a decimal density, got {density!r:.40}")


def _check_tensors(manifest: "Manifest") -> None:
    tensors = manifest.tensors
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise PackageError("manifest-tensors", f"expected 1 to {MAX_TENSORS} tensors, got {len(tensors)}")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise PackageError("manifest-tensors", "expected every tensor once, got a name twice")
    for tensor in tensors:
        rows, columns = tensor.shape
        if rows < 1 or columns < 1 or rows * columns > MAX_WEIGHTS_OF_A_TENSOR:
            raise PackageError(
                "manifest-tensors", f"expected 1 to 2^32 weights in {tensor.name!r:.100}, got {tensor.shape}"
            )
        if not 0 <= tensor.count <= rows * columns:
            raise PackageError(
                "manifest-counts", f"expected at most {rows * columns} masked weights, got {tensor.count}"
            )
    total = sum(manifest.counts)
    if total != manifest.mask.k or not 1 <= total <= MAX_K:
        raise PackageError(
            "manifest-counts", f"expected k = {manifest.mask.k} from 1 to {MAX_K}, got counts of {total}"
        )


def _check_layer(layer: "Layer") -> None:
    if not is_digest(layer.digest):
        raise PackageError("digest-malformed", f"expected a layer's digest, got {layer.digest!r:.100}")
    if layer.media_type != MEDIA_TYPES[layer.role]:
        expected = MEDIA_TYPES[layer.role]
        raise PackageError("manifest-schema", f"expected media type {expected}, got {layer.media_type!r:.80}")
    if layer.role is Role.FILE and layer.path not in FILE_NAMES:
        raise PackageError("layer-path", f"expected one of {sorted(FILE_NAMES)}, got {layer.path!r:.100}")
    if layer.role is not Role.FILE and layer.path is not None:
        raise PackageError("layer-path", f"expected no path of a {layer.role} layer, got {layer.path!r:.100}")


def _check_layers(manifest: "Manifest") -> None:
    for role in (*REQUIRED_ROLES, *OPTIONAL_ROLES):
        found = sum(layer.role is role for layer in manifest.layers)
        if found > 1 or (role in REQUIRED_ROLES and found == 0):
            raise PackageError("manifest-layers", f"expected one {role} layer, got {found}")
    files = [layer.path for layer in manifest.layers if layer.role is Role.FILE]
    if len(set(files)) != len(files):
        raise PackageError("manifest-layers", f"expected every file once, got {files}")
    if sort_layers(manifest.layers) != manifest.layers:
        raise PackageError("manifest-layers", "expected layers by role, then by path")
    config = manifest.files().get("config.json")
    if config is None or config.digest != manifest.model.config:
        raise PackageError("manifest-layers", "expected a file config.json with the digest in model.config")


def _check_sizes(manifest: "Manifest") -> None:
    """FORMAT 3.4: what each layer can weigh, known before a byte of it is downloaded."""
    scheme, k = manifest.scheme, manifest.mask.k
    codes = sum(packed_size(tensor.shape) for tensor in manifest.tensors)
    scales = 4 * sum(
        math.prod(scales_shape(scheme.name, t.shape, scheme.group_size)) for t in manifest.tensors
    )
    code_book = 320 * len(manifest.tensors) if scheme.name is Scheme.NF4 else 0
    overhead = MAX_HEADER_BYTES + 8
    bounds = {
        Role.DENSE: (codes + scales, codes + scales + code_book + overhead),
        Role.PLAIN: (0, MAX_LAYER_BYTES),
        Role.MASK: (4 * k, 4 * k + overhead),
        Role.VALUES: (2 * k, 4 * k + overhead),
        Role.EXPONENTS: (k, k + overhead),
        Role.BASIS: (k, MAX_BASIS_RANK * k + overhead),
        Role.FILE: (0, MAX_FILE_BYTES),
    }
    for layer in manifest.layers:
        least, most = bounds[layer.role]
        if not least <= layer.size_bytes <= most:
            raise PackageError(
                "layer-size",
                f"expected a {layer.role} layer of {least} to {most} bytes, got {layer.size_bytes}",
            )


def sort_layers(layers: "Sequence[Layer]") -> "tuple[Layer, ...]":
    """Layers in the order that a manifest wants: by role, then by path."""
    roles = list(Role)
    return tuple(sorted(layers, key=lambda layer: (roles.index(layer.role), layer.path or "")))
