"""The manifest (FORMAT 3): what a package consists of, in canonical JSON. Its digest is the package's name.

Parsing checks everything that the manifest alone can tell, so that nothing is downloaded for one that cannot
be true. Nothing here reads a blob or a clock.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any

from permille.errors import PackageError
from permille.package.blobs import digest_of, is_digest
from permille.package.canonical import JSON, canonical_json, parse_canonical
from permille.quantization.types import Scheme, packed_size, scales_shape

FORMAT = "permille-package"
VERSION = 1
MEDIA_TYPE = "application/vnd.permille.manifest+json"
MAX_MANIFEST_BYTES = 4 << 20
MAX_HEADER_BYTES = 8 << 20
MAX_FILE_BYTES = 64 << 20
MAX_LAYER_BYTES = 1 << 42
MAX_TENSORS = 1 << 16
MAX_WEIGHTS_OF_A_TENSOR = 1 << 32  # FORMAT 4.3: indices are uint32
GROUP_SIZES = {Scheme.NF4: (64,), Scheme.INT4: (32, 128)}

# FORMAT 3.3: the only names of files in a package. Each is a bare name, none is code.
FILE_NAMES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
        "LICENSE",
    }
)


class Role(StrEnum):
    """What a layer holds."""

    DENSE = "dense"
    PLAIN = "plain"
    MASK = "mask"
    VALUES = "values"
    FILE = "file"


MEDIA_TYPES = {
    Role.DENSE: "application/vnd.permille.dense+safetensors",
    Role.PLAIN: "application/vnd.permille.plain+safetensors",
    Role.MASK: "application/vnd.permille.mask+safetensors",
    Role.VALUES: "application/vnd.permille.values+safetensors",
    Role.FILE: "application/vnd.permille.file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model: its family, and the digest of its `config.json`, which is one of the layers."""

    family: str
    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the dense layer was made. `mask_aware`: masked weights were left out of their group's absmax."""

    name: Scheme
    group_size: int
    mask_aware: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskInfo:
    """How the masked weights were chosen. `density` is a decimal number as text; `k` counts all of them."""

    method: str
    density: str
    scope: str
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One quantized weight: its (N, K), how many of its weights are masked. Its index is the tensor_id."""

    name: str
    shape: tuple[int, int]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One blob of the package. `path` is the file's name for the role FILE, else None."""

    role: Role
    media_type: str
    digest: str
    size_bytes: int
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A package. Order of `tensors` is the model's; layers are in the order of `Role`, files by name.

    Raises:
        PackageError: a rule of FORMAT 3 is broken; the code says which.
    """

    model: ModelInfo
    scheme: Quantization
    mask: MaskInfo
    tensors: tuple[TensorInfo, ...]
    layers: tuple[Layer, ...]
    provenance: Mapping[str, JSON] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        _check_manifest(self)

    @property
    def counts(self) -> tuple[int, ...]:
        """Masked weights of each tensor, in tensor_id order."""
        return tuple(tensor.count for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        """Bytes of the manifest and of all its distinct blobs."""
        return len(self.to_bytes()) + sum({x.digest: x.size_bytes for x in self.layers}.values())

    @property
    def digest(self) -> str:
        """The package's name."""
        return digest_of(self.to_bytes())

    def layer(self, role: Role) -> Layer:
        """The layer of a role that occurs once."""
        return next(layer for layer in self.layers if layer.role is role)

    def files(self) -> dict[str, Layer]:
        """The FILE layers by name."""
        return {layer.path: layer for layer in self.layers if layer.path is not None}

    def to_bytes(self) -> bytes:
        """Canonical bytes (FORMAT 3.1)."""
        return canonical_json(
            {
                "format": self.format,
                "version": self.version,
                "model": {"family": self.model.family, "config": self.model.config},
                "scheme": {
                    "name": self.scheme.name,
                    "group_size": self.scheme.group_size,
                    "mask_aware": self.scheme.mask_aware,
                },
                "mask": {
                    "method": self.mask.method,
                    "density": self.mask.density,
                    "scope": self.mask.scope,
                    "k": self.mask.k,
                },
                "tensors": [{"name": t.name, "shape": t.shape, "count": t.count} for t in self.tensors],
                "layers": [
                    {
                        "role": x.role,
                        "media_type": x.media_type,
                        "digest": x.digest,
                        "size_bytes": x.size_bytes,
                        "path": x.path,
                    }
                    for x in self.layers
                ],
                "provenance": self.provenance,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parse canonical bytes. Check their digest first.

        Raises:
            PackageError: `json-size`, `json-malformed`, `json-not-canonical`, or a rule of FORMAT 3.
        """
        top = parse_canonical(data, MAX_MANIFEST_BYTES)
        if isinstance(top, Mapping) and (top.get("format"), top.get("version")) != (FORMAT, VERSION):
            got = f"{top.get('format')!r:.60} {top.get('version')!r:.20}"
            raise PackageError("manifest-version", f"expected {FORMAT} version {VERSION}, got {got}")
        return _manifest(_fields(top, "manifest", _TOP))


def sort_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Layers in the order that a manifest wants."""
    roles = list(Role)
    return tuple(sorted(layers, key=lambda layer: (roles.index(layer.role), layer.path or "")))


# --- from JSON -------------------------------------------------------------------------------------------

_TOP = {"format": str, "version": int, "model": dict, "scheme": dict, "mask": dict, "tensors": list}
_TOP |= {"layers": list, "provenance": dict}
_MODEL = {"family": str, "config": str}
_SCHEME = {"name": str, "group_size": int, "mask_aware": bool}
_MASK = {"method": str, "density": str, "scope": str, "k": int}
_TENSOR = {"name": str, "shape": list, "count": int}
_LAYER = {"role": str, "media_type": str, "digest": str, "size_bytes": int, "path": object}


def _fields(value: object, what: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The object's fields, exactly these and of these types."""
    if not isinstance(value, dict):
        raise PackageError("manifest-schema", f"expected {what} to be an object, got {type(value).__name__}")
    if value.keys() != kinds.keys():
        raise PackageError(
            "manifest-schema", f"expected {what} to have {sorted(kinds)}, got {sorted(value)!r:.300}"
        )
    for key, kind in kinds.items():
        good = type(value[key]) is kind if kind is not object else True
        if not good:
            got = type(value[key]).__name__
            raise PackageError("manifest-schema", f"expected {what}.{key} to be {kind.__name__}, got {got}")
    return value


def _manifest(top: dict[str, Any]) -> Manifest:
    scheme = _fields(top["scheme"], "scheme", _SCHEME)
    return Manifest(
        model=ModelInfo(**_fields(top["model"], "model", _MODEL)),
        scheme=Quantization(**scheme | {"name": _member(Scheme, scheme["name"])}),
        mask=MaskInfo(**_fields(top["mask"], "mask", _MASK)),
        tensors=tuple(_tensor(item) for item in top["tensors"]),
        layers=tuple(_layer(item) for item in top["layers"]),
        provenance=top["provenance"],
    )


def _tensor(item: object) -> TensorInfo:
    found = _fields(item, "tensor", _TENSOR)
    shape = found["shape"]
    if len(shape) != 2 or any(type(size) is not int for size in shape):
        raise PackageError("manifest-schema", f"expected a shape of two integers, got {shape!r:.100}")
    return TensorInfo(name=found["name"], shape=(shape[0], shape[1]), count=found["count"])


def _layer(item: object) -> Layer:
    found = _fields(item, "layer", _LAYER)
    if found["path"] is not None and type(found["path"]) is not str:
        raise PackageError("manifest-schema", "expected layer.path to be null or text")
    return Layer(**found | {"role": _member(Role, found["role"])})


def _member(kind: type[Any], value: str) -> Any:
    try:
        return kind(value)
    except ValueError as exc:
        raise PackageError("manifest-schema", f"expected a known {kind.__name__}, got {value!r:.60}") from exc


# --- rules -----------------------------------------------------------------------------------------------


def _check_manifest(manifest: Manifest) -> None:
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        got = f"{manifest.format!r:.60} {manifest.version!r:.20}"
        raise PackageError("manifest-version", f"expected {FORMAT} version {VERSION}, got {got}")
    _check_words(manifest)
    _check_tensors(manifest)
    for layer in manifest.layers:
        _check_layer(layer)
    _check_layers(manifest)
    _check_sizes(manifest)


def _check_words(manifest: Manifest) -> None:
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


def _check_tensors(manifest: Manifest) -> None:
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
    if total != manifest.mask.k or total < 1:
        raise PackageError("manifest-counts", f"expected k = {manifest.mask.k} >= 1, got counts of {total}")


def _check_layer(layer: Layer) -> None:
    if not is_digest(layer.digest):
        raise PackageError("digest-malformed", f"expected a layer's digest, got {layer.digest!r:.100}")
    if layer.media_type != MEDIA_TYPES[layer.role]:
        expected = MEDIA_TYPES[layer.role]
        raise PackageError("manifest-schema", f"expected media type {expected}, got {layer.media_type!r:.80}")
    if layer.role is Role.FILE and layer.path not in FILE_NAMES:
        raise PackageError("layer-path", f"expected one of {sorted(FILE_NAMES)}, got {layer.path!r:.100}")
    if layer.role is not Role.FILE and layer.path is not None:
        raise PackageError("layer-path", f"expected no path of a {layer.role} layer, got {layer.path!r:.100}")


def _check_layers(manifest: Manifest) -> None:
    for role in (Role.DENSE, Role.PLAIN, Role.MASK, Role.VALUES):
        found = sum(layer.role is role for layer in manifest.layers)
        if found != 1:
            raise PackageError("manifest-layers", f"expected one {role} layer, got {found}")
    files = [layer.path for layer in manifest.layers if layer.role is Role.FILE]
    if len(set(files)) != len(files):
        raise PackageError("manifest-layers", f"expected every file once, got {files}")
    if sort_layers(manifest.layers) != manifest.layers:
        raise PackageError("manifest-layers", "expected layers by role, then by path")
    config = manifest.files().get("config.json")
    if config is None or config.digest != manifest.model.config:
        raise PackageError("manifest-layers", "expected a file config.json with the digest in model.config")


def _check_sizes(manifest: Manifest) -> None:
    """FORMAT 3.4: what each layer can weigh, known before a byte of it is downloaded."""
    scheme, k = manifest.scheme, manifest.mask.k
    codes = sum(packed_size(tensor.shape) for tensor in manifest.tensors)
    scales = 4 * sum(
        _product(scales_shape(scheme.name, t.shape, scheme.group_size)) for t in manifest.tensors
    )
    code_book = 320 * len(manifest.tensors) if scheme.name is Scheme.NF4 else 0
    overhead = MAX_HEADER_BYTES + 8
    bounds = {
        Role.DENSE: (codes + scales, codes + scales + code_book + overhead),
        Role.PLAIN: (0, MAX_LAYER_BYTES),
        Role.MASK: (4 * k, 4 * k + overhead),
        Role.VALUES: (2 * k, 4 * k + overhead),
        Role.FILE: (0, MAX_FILE_BYTES),
    }
    for layer in manifest.layers:
        least, most = bounds[layer.role]
        if not least <= layer.size_bytes <= most:
            raise PackageError(
                "layer-size",
                f"expected a {layer.role} layer of {least} to {most} bytes, got {layer.size_bytes}",
            )


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def decimal_text(number: float) -> str:
    """A float as the shortest decimal text without exponent, as manifests carry it: 0.001 -> "0.001"."""
    try:
        return format(Decimal(repr(number)), "f")
    except InvalidOperation as exc:
        raise ValueError(f"expected a finite number, got {number!r}") from exc
