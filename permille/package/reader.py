"""Opening a package: nothing is returned that was not checked (FORMAT 5).

`Package.open` checks the manifest's digest before it is parsed, hashes the small layers (files, mask,
values), and holds the structure of all four layers against the manifest and the config. The two big layers
are mapped; their bytes are hashed when they enter the blob folder and again by `verify`. Scales and plain
numbers are checked as they are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.errors import PackageError
from permille.models.families import expected_tensors, scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.config_files import check_config_family, check_file, parse_config
from permille.package.layers import ABSMAX, QUANT_MAP, QUANT_STATE, SCALES, quant_state
from permille.package.manifest import MAX_FILE_BYTES, MAX_MANIFEST_BYTES, Layer, Manifest, Role
from permille.package.plan import DownloadPlan, check_plan
from permille.package.safetensors_io import FLOATS, RawTensor, SafetensorsFile
from permille.quantization import QuantizedTensor, Scheme
from permille.quantization.nf4 import NF4_CODES
from permille.quantization.types import packed_size, scales_shape

__all__ = ["DownloadPlan", "LayerReport", "Package", "VerifyReport", "check_plan", "verify_package"]

_DTYPES = {
    Role.DENSE: frozenset({"U8", "F32"}),
    Role.PLAIN: FLOATS,
    Role.MASK: frozenset({"U32"}),
    Role.VALUES: FLOATS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One layer that was checked."""

    role: Role
    path: str | None
    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification looked at. There is no report of a failure: that raises."""

    digest: str
    deep: bool
    family: str
    scheme: Scheme
    k: int
    tensors: int
    size_bytes: int
    layers: tuple[LayerReport, ...]


class Package:
    """An opened package. Arrays are read-only views of mapped files where nothing had to be converted."""

    def __init__(self, blobs: BlobFolder, manifest: Manifest) -> None:
        """Use `open`: this checks all but the manifest's own digest."""
        self.blobs = blobs
        self.manifest = manifest
        self.digest = manifest.digest
        for layer in manifest.layers:
            _check_size(blobs, layer)
        for layer in manifest.layers:
            if layer.role in (Role.FILE, Role.MASK, Role.VALUES):
                blobs.check(layer.digest)
        for path in manifest.files():
            check_file(path, self.file(path))
        self.config: dict[str, Any] = parse_config(self.file("config.json"))
        check_config_family(self.config, manifest.model.family)
        self._layers = {
            role: SafetensorsFile(blobs.path(manifest.layer(role).digest), dtypes=dtypes)
            for role, dtypes in _DTYPES.items()
        }
        _check_shapes(manifest, self.config, self._layers)
        for tensor in manifest.tensors:
            _check_indices(tensor.name, self._indices(tensor.name), tensor.shape[0] * tensor.shape[1])

    @classmethod
    def open(cls, blobs: BlobFolder, digest: str) -> "Package":
        """Open the package of this digest.

        Raises:
            PackageError: a rule of FORMAT 2 to 5 is broken; the code says which.
        """
        return cls(blobs, Manifest.from_bytes(blobs.read(digest, limit=MAX_MANIFEST_BYTES)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Masked weights of each tensor, in tensor_id order."""
        return self.manifest.counts

    @property
    def k(self) -> int:
        """All masked weights."""
        return self.manifest.mask.k

    @property
    def mask_digest(self) -> str:
        """Digest of the mask layer."""
        return self.manifest.layer(Role.MASK).digest

    @property
    def size_bytes(self) -> int:
        """Bytes of the manifest and of all its distinct blobs."""
        return self.manifest.size_bytes

    @property
    def plain_names(self) -> tuple[str, ...]:
        """Names of the tensors that are not quantized."""
        return self._layers[Role.PLAIN].names

    def layer_names(self, role: Role) -> tuple[str, ...]:
        """Names of the tensors in a layer, as its header has them."""
        return self._layers[role].names

    def plain_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is not quantized, without reading it."""
        return self._layers[Role.PLAIN].specs[name].shape

    def quantized(self, name: str) -> QuantizedTensor:
        """A quantized weight: packed codes and scales, mapped.

        Raises:
            KeyError: no such tensor.
            PackageError: `dense-scales`, `dense-padding` or `dense-code-book`.
        """
        shape = self._shapes[name]
        scheme, group_size = self.manifest.scheme.name, self.manifest.scheme.group_size
        dense = self._layers[Role.DENSE]
        if scheme is Scheme.NF4:
            _check_code_book(dense, name, shape, group_size)
        packed = dense.tensor(name).data
        scales = dense.tensor(name + (ABSMAX if scheme is Scheme.NF4 else SCALES)).float32()
        _check_scales(name, scales)
        if shape[0] * shape[1] % 2 and packed[-1] & 0x0F:
            raise PackageError("dense-padding", f"expected a last low nibble of 0 in {name}, got another")
        return QuantizedTensor(
            scheme=scheme, shape=shape, group_size=group_size, packed=packed, scales=scales
        )

    def plain(self, name: str) -> RawTensor:
        """A tensor that is not quantized, bit for bit as in the source model, mapped.

        Raises:
            KeyError: no such tensor.
            PackageError: `plain-not-finite`.
        """
        tensor = self._layers[Role.PLAIN].tensor(name)
        if not tensor.all_finite():
            raise PackageError("plain-not-finite", f"expected finite numbers in {name}, got NaN or infinity")
        return tensor

    def mask(self, name: str) -> NDArray[np.uint32]:
        """Flat indices of a weight's masked positions, strictly increasing (KeyError: no such tensor)."""
        return self._indices(name)

    def values(self) -> NDArray[np.float32]:
        """The sparse values [k] float32, tensors concatenated in tensor_id order; the caller's own copy.

        Raises:
            PackageError: `values-not-finite`.
        """
        found = [self._layers[Role.VALUES].tensor(tensor.name) for tensor in self.manifest.tensors]
        for tensor in found:
            if not tensor.all_finite():
                raise PackageError("values-not-finite", f"expected finite values of {tensor.name}")
        return np.concatenate([tensor.float32() for tensor in found])

    def values_dtype(self, name: str) -> str:
        """The source model's dtype of a masked weight: BF16, F16 or F32."""
        return self._layers[Role.VALUES].specs[name].dtype

    def file(self, path: str) -> bytes:
        """A file's bytes, hashed (KeyError: the package has no such file)."""
        return self.blobs.read(self.manifest.files()[path].digest, limit=MAX_FILE_BYTES)

    def verify(self, deep: bool = True) -> VerifyReport:
        """Hash every blob and look at every number; without `deep` what `open` did is reported.

        Raises:
            PackageError: the first rule that is broken.
        """
        if deep:
            for layer in self.manifest.layers:
                self.blobs.check(layer.digest)
            for tensor in self.manifest.tensors:
                self.quantized(tensor.name)
            for name in self.plain_names:
                self.plain(name)
        self.values()
        return _report(self, deep=deep)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, int]]:
        return {tensor.name: tensor.shape for tensor in self.manifest.tensors}

    def _indices(self, name: str) -> NDArray[np.uint32]:
        return self._layers[Role.MASK].tensor(name).data.view("<u4").astype(np.uint32, copy=False)


def verify_package(blobs: BlobFolder, digest: str, deep: bool = True) -> VerifyReport:
    """Check a package as a stranger would: every blob's digest before its bytes are parsed.

    Args:
        deep: also hash the two big layers and look at every number in them.

    Raises:
        PackageError: the first rule that is broken; the code says which.
    """
    manifest = Manifest.from_bytes(blobs.read(digest, limit=MAX_MANIFEST_BYTES))
    if deep:
        for layer in manifest.layers:
            _check_size(blobs, layer)
            blobs.check(layer.digest)
    return Package.open(blobs, digest).verify(deep=deep)


def _report(package: Package, *, deep: bool) -> VerifyReport:
    manifest = package.manifest
    return VerifyReport(
        digest=package.digest,
        deep=deep,
        family=manifest.model.family,
        scheme=manifest.scheme.name,
        k=package.k,
        tensors=len(manifest.tensors),
        size_bytes=package.size_bytes,
        layers=tuple(
            LayerReport(role=x.role, path=x.path, digest=x.digest, size_bytes=x.size_bytes)
            for x in manifest.layers
        ),
    )


# --- rules -----------------------------------------------------------------------------------------------


def _check_size(blobs: BlobFolder, layer: Layer) -> None:
    size = blobs.size(layer.digest)
    if size != layer.size_bytes:
        raise PackageError("blob-size", f"expected {layer.size_bytes} bytes of {layer.digest}, got {size}")


def _check_shapes(
    manifest: Manifest, config: Mapping[str, Any], layers: Mapping[Role, SafetensorsFile]
) -> None:
    """FORMAT 5.3: names and shapes are those that the config asks for, no more and no fewer."""
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
        Role.MASK: counts,
        Role.VALUES: counts,
    }
    for role, shapes in expected.items():
        _check_layer_shapes(role, layers[role], shapes)


def _dense_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    scheme, group_size = manifest.scheme.name, manifest.scheme.group_size
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in manifest.tensors:
        packed, scales = packed_size(tensor.shape), scales_shape(scheme, tensor.shape, group_size)
        if scheme is Scheme.INT4:
            shapes |= {tensor.name: (packed,), tensor.name + SCALES: scales}
            continue
        state = (len(quant_state(tensor.shape, group_size)),)
        shapes |= {tensor.name: (packed, 1), tensor.name + ABSMAX: scales}
        shapes |= {tensor.name + QUANT_MAP: (16,), tensor.name + QUANT_STATE: state}
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


def _check_indices(name: str, indices: NDArray[np.uint32], weights: int) -> None:
    if np.any(indices[1:] <= indices[:-1]):
        raise PackageError("mask-order", f"expected strictly increasing indices of {name}")
    if indices.size and int(indices[-1]) >= weights:
        raise PackageError(
            "mask-range", f"expected indices of {name} below {weights}, got {int(indices[-1])}"
        )


def _check_scales(name: str, scales: NDArray[np.float32]) -> None:
    # NaN fails the comparison too.
    if not np.all((scales >= 0) & (scales < np.inf)):
        raise PackageError("dense-scales", f"expected finite scales of {name} from 0, got others")


def _check_code_book(dense: SafetensorsFile, name: str, shape: tuple[int, int], group_size: int) -> None:
    state = dense.tensor(name + QUANT_STATE).data.tobytes()
    code_book = dense.tensor(name + QUANT_MAP).data.tobytes()
    if state != quant_state(shape, group_size) or code_book != NF4_CODES.astype("<f4").tobytes():
        raise PackageError("dense-code-book", f"expected NF4's table and state of {shape} beside {name}")
