"""Opening packages. Everything that is returned has been checked (FORMAT 4.8).

`Package.open` does this, in order:

1. It checks the digest of the manifest, and parses it.
2. It hashes the small layers: files, blocks, mask, adapter, values, reference and basis.
3. It compares the structure of all layers with the manifest and the config.

The big layers (dense and plain) are mapped. All their blocks are hashed when the first of their
tensors is read. So opening is fast, and nothing computes with damaged bytes. A tensor's numbers
(codes, scales, plain numbers) are checked when the tensor is read.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.choices import AdapterKind
from permille.errors import InputError, PackageError
from permille.models.families import expected_tensors, shape_of
from permille.package import reference_rows
from permille.package.basis import DTYPES as BASIS_DTYPES
from permille.package.basis import Basis, read_basis
from permille.package.blobs import BlobFolder
from permille.package.blocks import check_blocks, package_blocks
from permille.package.config_files import check_config_family, check_file, parse_config
from permille.package.layers import ABSMAX, MINIMA, SCALES, are_table_scales
from permille.package.limits import BLOCKED_ROLES, MAX_FILE_BYTES, MAX_MANIFEST_BYTES, Role
from permille.package.manifest import AdapterInfo, Layer, Manifest, Quantization
from permille.package.safetensors_io import SafetensorsFile
from permille.package.structure import (
    check_code_book,
    check_codes,
    check_indices,
    check_program,
    check_scales,
    check_shapes,
)
from permille.quantization.types import (
    QuantizedTensor,
    Scheme,
    scales_shape,
)
from permille.tensors import FLOATS, Q8_0, RawTensor

_BUILD_AGAIN = "Build the package again, from a model whose weights are finite."
_DTYPES = {
    Role.DENSE: frozenset({"U8", "I8", "F16", "F32"}),
    Role.PLAIN: FLOATS | {"U8"},
    Role.MASK: frozenset({"U32"}),
    Role.ADAPTER: FLOATS,
    Role.VALUES: FLOATS,
    Role.REFERENCE: reference_rows.DTYPES,
    Role.BASIS: BASIS_DTYPES,
}


class Package:
    """An opened package. Arrays are read-only views of mapped files, unless they had to be converted.

    Example:

        package = Package.open(BlobFolder(Path("blobs")), "sha256:0123...")
        print(package.k, "trained numbers")
        weight = package.quantized("model.layers.0.mlp.up_proj.weight")
    """

    def __init__(self, blobs: BlobFolder, manifest: Manifest) -> None:
        """Check everything except the digest of the manifest. Use `open` instead."""
        self.blobs = blobs
        self.manifest = manifest
        self.digest = manifest.digest
        for layer in _needed(blobs, manifest):
            _check_size(blobs, layer)
        for layer in manifest.layers:
            # Big layers are checked block by block at their first use, and a program when it is used.
            if layer.role not in (*BLOCKED_ROLES, Role.PROGRAM):
                blobs.check(layer.digest)
        for path in manifest.files():
            check_file(path, self.file(path))
        self.config: dict[str, Any] = parse_config(self.file("config.json"))
        check_config_family(self.config, manifest.model.family)
        blocks = package_blocks(blobs, manifest)
        # The first block of a layer holds its header, which is parsed below. If a header is longer than
        # 1 MiB, its rest is hashed before the first tensor is read.
        check_blocks(blobs, [block for block in blocks if block.begin == 0])
        self._unchecked = blocks
        self._checking = threading.Lock()
        self._layers = {
            role: SafetensorsFile(blobs.path(manifest.layer(role).digest), dtypes=dtypes)
            for role, dtypes in _DTYPES.items()
            if manifest.has_layer(role)
        }
        # After this check, names and shapes are right, so the lookups below cannot fail.
        check_shapes(manifest, self.config, self._layers)
        for tensor in manifest.tensors if manifest.adapter is None else ():
            check_indices(tensor.name, self.mask(tensor.name), tensor.shape[0] * tensor.shape[1])
        # These calls only check the layers. Their results are not needed here.
        self.reference_rows()
        self.basis()

    def __repr__(self) -> str:
        return f"Package({self.digest}, k={self.k}, size_bytes={self.size_bytes})"

    @classmethod
    def open(cls, blobs: BlobFolder, digest: str) -> "Package":
        """Open the package with this digest.

        Raises:
            PackageError: a rule of FORMAT 2 to 4 is broken. The error's code names the rule.
        """
        return cls(blobs, Manifest.from_bytes(blobs.read(digest, limit=MAX_MANIFEST_BYTES)))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of masked weights, or of trained numbers of the adapter, for each tensor by
        tensor_id.
        """
        return self.manifest.counts

    @property
    def k(self) -> int:
        """The number of masked weights, or of trained numbers of the adapter."""
        return self.manifest.k

    @property
    def mask_digest(self) -> str:
        """The digest of the mask layer, or of the adapter layer if the package has an adapter."""
        return self.manifest.mask_digest

    @property
    def size_bytes(self) -> int:
        """The bytes of the manifest and of all distinct blobs."""
        return self.manifest.size_bytes

    @property
    def plain_names(self) -> tuple[str, ...]:
        """The names of the tensors that are not quantized."""
        return self._layers[Role.PLAIN].names

    def layer_names(self, role: Role) -> tuple[str, ...]:
        """Return the names of the tensors in a layer, in the order of their data in the file."""
        return self._layers[role].names

    def plain_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is not quantized, without reading it."""
        return self._plain_shapes[name]

    def plain_dtype(self, name: str) -> str:
        """Return the dtype of a tensor that is not quantized, without reading it: BF16, F16, F32 or
        Q8_0.
        """
        found = self._layers[Role.PLAIN].specs[name].dtype
        return Q8_0 if found == "U8" else found

    def check_blocks(self) -> None:
        """Hash all blocks of the big layers. Later calls do nothing.

        Raises:
            PackageError: `block-digest`.
        """
        # Threads of an engine may ask for their first tensors at the same time.
        with self._checking:
            check_blocks(self.blobs, self._unchecked)
            self._unchecked = []

    def quantized(self, name: str) -> QuantizedTensor:
        """Return a quantized weight: packed codes and scales. The arrays are memory-mapped.

        Raises:
            KeyError: no such tensor.
            PackageError: `block-digest`, `dense-scales`, `dense-codes`, `dense-padding` or
                `dense-code-book`.
        """
        shape, scheme = self._shapes[name], self.manifest.scheme
        dense = self._checked(Role.DENSE)
        if scheme.name is Scheme.NF4:
            check_code_book(dense, name, shape, scheme.group_size)
        return read_codes(dense, name, shape, scheme)

    def plain(self, name: str) -> RawTensor:
        """Return a tensor that is not quantized, in the dtype of the model or in Q8_0, memory-mapped.

        Raises:
            KeyError: no such tensor.
            PackageError: `block-digest`, `plain-not-finite` or `plain-scales`.
        """
        tensor = self._checked(Role.PLAIN).tensor(name)
        # safetensors has no dtype for Q8_0, so embedding tables in Q8_0 are stored as bytes (FORMAT 4.3).
        if tensor.dtype == "U8":
            tensor = replace(tensor, dtype=Q8_0, shape=self._plain_shapes[name])
            if not are_table_scales(tensor):
                raise PackageError(
                    "plain-scales", f"A scale of {name} is negative, NaN or infinite. {_BUILD_AGAIN}"
                )
            return tensor
        if not tensor.all_finite():
            raise PackageError("plain-not-finite", f"{name} holds NaN or infinity. {_BUILD_AGAIN}")
        return tensor

    def mask(self, name: str) -> NDArray[np.uint32]:
        """Return the flat indices of a weight's masked positions, strictly increasing.

        Raises:
            KeyError: no such tensor.
            InputError: the package has an adapter instead of a mask.
        """
        if self.manifest.adapter is not None:
            got = f"{self.manifest.adapter.kind} of rank {self.manifest.adapter.rank}"
            raise InputError(f"The package has no mask, but an adapter ({got}). Use a package with a mask.")
        return self._layers[Role.MASK].tensor(name).data.view("<u4").astype(np.uint32, copy=False)

    def values(self) -> NDArray[np.float32]:
        """Return the values from which training starts, float32 [k], tensor by tensor, as a new array.

        With a mask, they are the values of the masked weights. With a LoRA adapter, they are the matrix A of
        each tensor, then its B. With LoRA-FA, they are B only. B starts at 0.

        Raises:
            PackageError: `values-not-finite` or `adapter-not-finite`.
        """
        if self.manifest.adapter is not None:
            return self._adapter_values(self.manifest.adapter)
        found = [self._layers[Role.VALUES].tensor(tensor.name) for tensor in self.manifest.tensors]
        for tensor in found:
            if not tensor.all_finite():
                raise PackageError(
                    "values-not-finite", f"The values of {tensor.name} hold NaN or infinity. {_BUILD_AGAIN}"
                )
        return np.concatenate([tensor.float32() for tensor in found])

    def adapter_matrix(self, name: str) -> NDArray[np.float32]:
        """Return the matrix A [rank, K] of a weight. LoRA-FA never changes it, and LoRA starts training from
        it.

        Raises:
            KeyError: no such tensor, or it is outside of the adapter's scope.
            PackageError: `adapter-not-finite`.
        """
        tensor = self._layers[Role.ADAPTER].tensor(name)
        if not tensor.all_finite():
            raise PackageError(
                "adapter-not-finite", f"The adapter of {name} holds NaN or infinity. {_BUILD_AGAIN}"
            )
        return tensor.float32().reshape(tensor.shape)

    def _adapter_values(self, adapter: AdapterInfo) -> NDArray[np.float32]:
        # Begin with an empty array, because numpy refuses to join an empty list.
        parts = [np.empty(0, np.float32)]
        for tensor in self.manifest.tensors:
            if tensor.count:
                a_RK = self.adapter_matrix(tensor.name)
                parts += [a_RK.reshape(-1)] if adapter.kind is AdapterKind.LORA else []
                # B begins at zero, so the adapter does not change the model before training.
                parts.append(np.zeros(tensor.shape[0] * adapter.rank, np.float32))
        return np.concatenate(parts)

    def reference_rows(self) -> reference_rows.ReferenceRows | None:
        """Return the reference, rows of public text that measure general knowledge (FORMAT 4.12), or None.

        Raises:
            PackageError: `reference`.
        """
        layer = self._layers.get(Role.REFERENCE)
        if layer is None:
            return None
        positions = self.config.get("max_position_embeddings")
        return reference_rows.read_reference(layer, shape_of(self.config).vocabulary, positions)

    def basis(self) -> Basis | None:
        """Return the basis, directions for the first steps of zeroth order (FORMAT 4.13), or None.

        Raises:
            PackageError: `basis`.
        """
        layer = self._layers.get(Role.BASIS)
        return None if layer is None else read_basis(layer, self.k)

    def program(self) -> Path | None:
        """Return the path of the checked program, or None.

        Raises:
            PackageError: `program-header`, `blob-size`, `blob-digest`, or `blob-missing` if it was
                not downloaded.
        """
        if not self.manifest.has_layer(Role.PROGRAM):
            return None
        layer = self.manifest.layer(Role.PROGRAM)
        _check_size(self.blobs, layer)
        self.blobs.check(layer.digest)
        path = self.blobs.path(layer.digest)
        check_program(path)
        return path

    def file(self, path: str) -> bytes:
        """Return the checked bytes of a file. Raises KeyError if the package has no such file."""
        return self.blobs.read(self.manifest.files()[path].digest, limit=MAX_FILE_BYTES)

    def find_file(self, path: str) -> bytes | None:
        """Return the checked bytes of a file, or None if the package has no such file."""
        return self.file(path) if path in self.manifest.files() else None

    def _checked(self, role: Role) -> SafetensorsFile:
        self.check_blocks()
        return self._layers[role]

    @cached_property
    def _plain_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return expected_tensors(self.config)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, int]]:
        return {tensor.name: tensor.shape for tensor in self.manifest.tensors}


def read_codes(
    dense: SafetensorsFile, name: str, shape: tuple[int, int], how: Quantization
) -> QuantizedTensor:
    """Return the codes and scales of one weight of a dense layer.

    Raises:
        PackageError: `dense-scales`, `dense-codes` or `dense-padding`.
    """
    # NF4 uses the tensor names of bitsandbytes.
    beside = ABSMAX if how.name is Scheme.NF4 else SCALES
    packed, scales = dense.tensor(name).data, dense.tensor(name + beside).float32()
    wanted = scales_shape(how.name, shape, how.group_size)
    is_source = how.name is Scheme.SOURCE
    check_scales(name, how.name, scales)
    minima = None
    if is_source and name + MINIMA in dense.specs:
        minima = dense.tensor(name + MINIMA).float32()
        check_scales(name, how.name, minima)
    found = QuantizedTensor(
        scheme=how.name,
        shape=shape,
        group_size=how.group_size,
        packed=packed,
        scales=scales.reshape(wanted),
        minima=None if minima is None else minima.reshape(wanted),
    )
    check_codes(name, found)
    return found


def verify_package(blobs: BlobFolder, digest: str) -> Package:
    """Open a package and check all of it: every digest before the bytes are parsed, and every number.

    Raises:
        PackageError: the code names the first rule that is broken.

    Example:

        package = verify_package(BlobFolder(Path("blobs")), "sha256:0123...")
    """
    manifest = Manifest.from_bytes(blobs.read(digest, limit=MAX_MANIFEST_BYTES))
    for layer in _needed(blobs, manifest):
        _check_size(blobs, layer)
        blobs.check(layer.digest)
    # All digests have been verified by now, so no unchecked byte is parsed.
    package = Package(blobs, manifest)
    for tensor in manifest.tensors:
        package.quantized(tensor.name)
    for name in package.plain_names:
        package.plain(name)
    package.values()
    if manifest.has_layer(Role.PROGRAM) and blobs.has(manifest.layer(Role.PROGRAM).digest):
        package.program()
    return package


def _needed(blobs: BlobFolder, manifest: Manifest) -> list[Layer]:
    """Return all layers except a program that is not stored. Only a program may be missing (FORMAT 4.11)."""
    return [x for x in manifest.layers if x.role is not Role.PROGRAM or blobs.has(x.digest)]


def _check_size(blobs: BlobFolder, layer: Layer) -> None:
    size = blobs.size(layer.digest)
    if size != layer.size_bytes:
        raise PackageError(
            "blob-size", f"The blob {layer.digest} has {size} bytes, not {layer.size_bytes}. Fetch it again."
        )
