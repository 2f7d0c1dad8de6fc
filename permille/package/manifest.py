"""The manifest (FORMAT 3): what a package consists of, in canonical JSON. Its digest is the package's name.

Parsing checks everything that the manifest alone can tell, so that nothing is downloaded for one that cannot
be true. Nothing here reads a blob or a clock.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from permille.digests import JSON, canonical_json, digest_of, parse_canonical
from permille.errors import PackageError
from permille.package.limits import FORMAT, MAX_MANIFEST_BYTES, MEDIA_TYPES, VERSION, Role
from permille.package.rules import check_manifest, sort_layers
from permille.quantization.types import Scheme

__all__ = [
    "MAX_MANIFEST_BYTES",
    "MEDIA_TYPES",
    "Layer",
    "Manifest",
    "MaskInfo",
    "ModelInfo",
    "Quantization",
    "Role",
    "TensorInfo",
    "decimal_text",
    "sort_layers",
]


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
        check_manifest(self)

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

    def has_layer(self, role: Role) -> bool:
        """Whether there is a layer of this role: some are optional."""
        return any(layer.role is role for layer in self.layers)

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


def decimal_text(number: float) -> str:
    """A float as the shortest decimal text without exponent, as manifests carry it: 0.001 -> "0.001"."""
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number!r}")
    return format(Decimal(repr(number)), "f")
