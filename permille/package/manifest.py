"""The manifest of a package (FORMAT 3), in canonical JSON. Its digest is the name of the package.

Each record checks itself. The manifest checks rules about several records, such as the
sizes of layers. So a reader refuses an invalid manifest before it downloads anything else. This module
reads no blob and no clock.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from enum import StrEnum
from typing import Any, TypeVar

from permille.choices import AdapterKind
from permille.digests import JSON, canonical_json, digest_of, is_digest, parse_canonical
from permille.errors import PackageError
from permille.package.limits import (
    ADAPTER_ROLES,
    BLOCK_BYTES,
    BLOCK_HASH_BYTES,
    BLOCKED_ROLES,
    FILE_NAMES,
    FORMAT,
    GROUP_SIZES,
    MASK_ROLES,
    MAX_ALPHA,
    MAX_COLUMNS,
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    MAX_K,
    MAX_LAYER_BYTES,
    MAX_LENGTH_EXPONENT,
    MAX_MANIFEST_BYTES,
    MAX_RANK,
    MAX_REFERENCE_BYTES,
    MAX_TENSORS,
    MAX_WEIGHTS_OF_A_TENSOR,
    MEDIA_TYPES,
    PROGRAM_HEADER_BYTES,
    REQUIRED_ROLES,
    VERSION,
    Role,
)
from permille.quantization.types import (
    Scheme,
    bits_of,
    packed_size,
    scales_shape,
)

Member = TypeVar("Member", bound=StrEnum)

_EXPORT = "export"  # the key of a program in the provenance (FORMAT 4.9)
# FORMAT 4.2: an nf4 weight also has a code table and a quantization state, of at most this size together.
_CODE_BOOK_BYTES = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model: its family, and the digest of its `config.json`, which is one of the layers."""

    family: str
    config: str

    def __post_init__(self) -> None:
        _check_word(self.family)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The quantization of the dense layer."""

    name: Scheme
    group_size: int

    def __post_init__(self) -> None:
        allowed = GROUP_SIZES[self.name]
        if self.group_size not in allowed:
            raise PackageError(
                "manifest-schema", f"expected a group size of {allowed}, got {self.group_size}"
            )

    def dense_bounds(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the smallest and the largest size of one weight in the dense layer, in bytes.

        The header of the layer is not included.
        """
        # FORMAT 4.2: scales are float16 with scheme source, as in GGUF blocks, and float32 otherwise.
        item = 2 if self.name is Scheme.SOURCE else 4
        scales = math.prod(scales_shape(self.name, shape, self.group_size))
        least = packed_size(bits_of(self.name), shape) + item * scales
        if self.name is Scheme.SOURCE:  # each tensor is between Q4_0 (least) and Q8_0 (most)
            return least, least + shape[0] * shape[1] // 2
        return (least, least + _CODE_BOOK_BYTES) if self.name is Scheme.NF4 else (least, least)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskInfo:
    """The choice of the masked weights.

    Attributes:
        density: a decimal number as text, since canonical JSON has no floats.
        k: the number of masked weights.
    """

    method: str
    density: str
    scope: str
    k: int

    def __post_init__(self) -> None:
        _check_word(self.method)
        _check_word(self.scope)
        # Allow neither an exponent nor a sign, so that one density has few spellings.
        if not re.fullmatch(r"[0-9]\.[0-9]{1,20}|0|1", self.density, re.ASCII):
            raise PackageError("manifest-schema", f"expected a decimal density, got {self.density!r:.40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """Low-rank matrices beside the linears in scope: `y = W x + alpha / rank * B A x` (FORMAT 4.10).

    Attributes:
        k: the number of trained numbers.
    """

    kind: AdapterKind
    rank: int
    alpha: int
    scope: str
    k: int

    def __post_init__(self) -> None:
        _check_word(self.scope)
        if not 1 <= self.rank <= MAX_RANK or not 1 <= self.alpha <= MAX_ALPHA:
            got = f"{self.rank} and {self.alpha}"
            raise PackageError(
                "manifest-schema", f"expected rank 1 to {MAX_RANK} and alpha 1 to {MAX_ALPHA}, got {got}"
            )

    @property
    def scale(self) -> float:
        """The factor `alpha / rank` of the product of both matrices."""
        return self.alpha / self.rank

    def count(self, shape: tuple[int, int]) -> int:
        """Return how many numbers are trained beside a linear of shape (N, K).

        They are B [N, rank] and, for LoRA, also A [rank, K].

        Example:
            >>> AdapterInfo(kind=AdapterKind.LORA, rank=8, alpha=16, scope="all", k=0).count((64, 32))
            768
        """
        rows, columns = shape
        return self.rank * (rows + columns if self.kind is AdapterKind.LORA else rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Euclidean lengths of zeroth order, over all trained weights together.

    A build measures them on public text (`permille.training.lengths`). Without text, it takes the defaults.

    Attributes:
        perturbation: the length of a perturbation.
        step: the length of the first step.
    """

    perturbation: float = 0.5
    step: float = 0.5

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            # NaN fails the comparison, too.
            if not 2.0**-MAX_LENGTH_EXPONENT <= number <= 2.0**MAX_LENGTH_EXPONENT:
                bounds = f"2^-{MAX_LENGTH_EXPONENT} to 2^{MAX_LENGTH_EXPONENT}"
                raise PackageError("manifest-schema", f"lengths.{name} must be {bounds}, not {number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A quantized weight: its shape (N, K), and the count of its trained numbers.

    With a mask, `count` is the number of masked weights. The tensor_id is the index in `Manifest.tensors`.
    """

    name: str
    shape: tuple[int, int]
    count: int

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if rows < 1 or columns < 1 or rows * columns > MAX_WEIGHTS_OF_A_TENSOR:
            raise PackageError(
                "manifest-tensors", f"expected 1 to 2^32 weights in {self.name!r:.100}, got {self.shape}"
            )
        if not 0 <= self.count <= rows * columns:
            raise PackageError(
                "manifest-counts", f"expected at most {rows * columns} trained numbers, got {self.count}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A blob of the package. `path` is the name of the file for the role FILE, else None."""

    role: Role
    digest: str
    size_bytes: int
    path: str | None = None

    def __post_init__(self) -> None:
        if not is_digest(self.digest):
            raise PackageError("digest-malformed", f"expected a layer's digest, got {self.digest!r:.100}")
        if self.role is Role.FILE and self.path not in FILE_NAMES:
            raise PackageError("layer-path", f"expected one of {sorted(FILE_NAMES)}, got {self.path!r:.100}")
        if self.role is not Role.FILE and self.path is not None:
            raise PackageError(
                "layer-path", f"expected no path for a {self.role} layer, got {self.path!r:.100}"
            )

    @property
    def media_type(self) -> str:
        """The media type of the layer's role."""
        return MEDIA_TYPES[self.role]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest. `tensors` are in the order of the model, and `layers` in the order of `Role`.

    Raises:
        PackageError: a rule of FORMAT 3 is broken. The code says which.

    Example:

        manifest = Manifest.from_bytes(blobs.read(digest, limit=MAX_MANIFEST_BYTES))
        print(manifest.trains, manifest.size_bytes)
    """

    model: ModelInfo
    scheme: Quantization
    trainable: MaskInfo | AdapterInfo
    tensors: tuple[TensorInfo, ...]
    layers: tuple[Layer, ...]
    lengths: Lengths = Lengths()
    provenance: Mapping[str, JSON] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_tensors()
        self._check_layers()
        self._check_sizes()

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of masked weights, or of trained numbers of the adapter, for each tensor by
        tensor_id.
        """
        return tuple(tensor.count for tensor in self.tensors)

    @property
    def k(self) -> int:
        """The number of masked weights, or of trained numbers of the adapter."""
        return self.trainable.k

    @property
    def trains(self) -> str:
        """A description of the trained numbers and of the storage of the frozen weights, for people."""
        adapter, scheme = self.adapter, self.scheme.name
        if adapter is None:
            return f"{self.k} weights over {scheme}"
        return f"{adapter.kind} of rank {adapter.rank}, {self.k} numbers, over {scheme}"

    @property
    def adapter(self) -> AdapterInfo | None:
        """The adapter, or None if the package has a mask."""
        return self.trainable if isinstance(self.trainable, AdapterInfo) else None

    @property
    def mask_digest(self) -> str:
        """The digest of the mask layer or the adapter layer. Logs and states hold it as `mask_digest`."""
        return self.layer(Role.MASK if self.adapter is None else Role.ADAPTER).digest

    @property
    def size_bytes(self) -> int:
        """The bytes of the manifest and of all distinct blobs."""
        # Layers with the same bytes share one blob, so it counts once.
        return len(self.to_bytes()) + sum({x.digest: x.size_bytes for x in self.layers}.values())

    @property
    def digest(self) -> str:
        """The digest of the canonical bytes, which is the package's name."""
        return digest_of(self.to_bytes())

    def layer(self, role: Role) -> Layer:
        """Return the layer of a role that occurs once."""
        return next(layer for layer in self.layers if layer.role is role)

    def has_layer(self, role: Role) -> bool:
        """Return whether the package has a layer of this role."""
        return any(layer.role is role for layer in self.layers)

    def files(self) -> dict[str, Layer]:
        """Return the FILE layers by name."""
        return {layer.path: layer for layer in self.layers if layer.path is not None}

    def with_program(self, layer: Layer, made: Mapping[str, JSON]) -> "Manifest":
        """Return this package with a program, and the record of how it was made. An earlier program is
        replaced.
        """
        parent = self.parent()
        provenance = {**parent.provenance, _EXPORT: dict(made)}
        return replace(parent, layers=sort_layers([*parent.layers, layer]), provenance=provenance)

    def with_part(self, layer: Layer, made: Mapping[str, JSON]) -> "Manifest":
        """Return this package with a reference or a basis, and the record of how it was made."""
        layers = sort_layers([*(x for x in self.layers if x.role is not layer.role), layer])
        return replace(self, layers=layers, provenance={**self.provenance, layer.role.value: dict(made)})

    def parent(self) -> "Manifest":
        """Return this package without its program, which is made from the parent and bound to it (FORMAT
        4.9).
        """
        provenance = {key: value for key, value in self.provenance.items() if key != _EXPORT}
        layers = tuple(layer for layer in self.layers if layer.role is not Role.PROGRAM)
        return replace(self, layers=layers, provenance=provenance)

    def to_bytes(self) -> bytes:
        """Return the canonical bytes (FORMAT 3.1)."""
        return canonical_json(
            {
                "format": FORMAT,
                "version": VERSION,
                "model": asdict(self.model),
                "scheme": asdict(self.scheme),
                "mask" if self.adapter is None else "adapter": asdict(self.trainable),
                "tensors": [asdict(tensor) for tensor in self.tensors],
                "layers": [asdict(layer) | {"media_type": layer.media_type} for layer in self.layers],
                "lengths": {name: number.hex() for name, number in asdict(self.lengths).items()},
                "provenance": self.provenance,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parse canonical bytes. The caller must have checked their digest before.

        Raises:
            PackageError: `json-size`, `json-malformed`, `json-not-canonical`, or a broken rule of
                FORMAT 3.
        """
        top = parse_canonical(data, MAX_MANIFEST_BYTES)
        if isinstance(top, Mapping) and (top.get("format"), top.get("version")) != (FORMAT, VERSION):
            got = f"{top.get('format')!r:.60} {top.get('version')!r:.20}"
            raise PackageError(
                "manifest-version",
                f"The manifest has the format {got}, but this version of permille reads {FORMAT} {VERSION}.",
            )
        # The key `mask` or `adapter` decides the kind of the package (FORMAT 3.1).
        chosen = "adapter" if isinstance(top, Mapping) and "adapter" in top else "mask"
        fields = _fields(top, "manifest", _TOP | {chosen: dict})
        scheme = _fields(fields["scheme"], "scheme", _SCHEME)
        return cls(
            model=ModelInfo(**_fields(fields["model"], "model", _MODEL)),
            scheme=Quantization(name=_member(Scheme, scheme["name"]), group_size=scheme["group_size"]),
            trainable=_adapter(fields[chosen])
            if chosen == "adapter"
            else MaskInfo(**_fields(fields[chosen], "mask", _MASK)),
            tensors=tuple(_tensor(item) for item in fields["tensors"]),
            layers=tuple(_layer(item) for item in fields["layers"]),
            lengths=_lengths(fields["lengths"]),
            provenance=fields["provenance"],
        )

    def _check_tensors(self) -> None:
        number, total = len(self.tensors), sum(self.counts)
        if not 1 <= number <= MAX_TENSORS:
            raise PackageError("manifest-tensors", f"expected 1 to {MAX_TENSORS} tensors, got {number}")
        if len({tensor.name for tensor in self.tensors}) != number:
            raise PackageError("manifest-tensors", "A tensor is listed twice.")
        # GGUF codes come in blocks of 32 weights along a row.
        if self.scheme.name is Scheme.SOURCE and any(t.shape[1] % 32 for t in self.tensors):
            raise PackageError(
                "manifest-tensors", "With scheme source, the width of each tensor must be a multiple of 32."
            )
        # Packed states store k, and logs store the counts, so k must be the sum of the counts (FORMAT 3.2).
        if total != self.k or not 1 <= total <= MAX_K:
            raise PackageError(
                "manifest-counts",
                f"expected counts that add up to k = {self.k}, and k from 1 to {MAX_K}, got a sum of {total}",
            )
        for tensor in self.tensors:
            if self.adapter is not None and tensor.count not in (0, self.adapter.count(tensor.shape)):
                wanted = self.adapter.count(tensor.shape)
                raise PackageError(
                    "manifest-counts",
                    f"expected 0 or {wanted} trained numbers of {tensor.name!r:.100}, got {tensor.count}",
                )

    def _check_layers(self) -> None:
        roles: tuple[tuple[Role, ...], tuple[Role, ...]] = (MASK_ROLES, ADAPTER_ROLES)
        trained, excluded = roles if self.adapter is None else reversed(roles)
        required = (*REQUIRED_ROLES, *trained)
        for role in Role:
            found = sum(layer.role is role for layer in self.layers)
            if role is not Role.FILE and (found > 1 or (role in required and found == 0)):
                raise PackageError(
                    "manifest-layers", f"A package has one {role} layer, and this one has {found}."
                )
            if role in excluded and found:
                raise PackageError(
                    "manifest-layers",
                    f"A package has a mask or an adapter, so this one may not have a {role} layer.",
                )
        files = [layer.path for layer in self.layers if layer.role is Role.FILE]
        if len(set(files)) != len(files):
            raise PackageError("manifest-layers", f"A file is listed twice: {files}")
        # Require one order, so that equal packages have equal manifests and digests.
        if sort_layers(self.layers) != self.layers:
            raise PackageError("manifest-layers", "The layers are not sorted by role, then by path.")
        config = self.files().get("config.json")
        if config is None or config.digest != self.model.config:
            raise PackageError(
                "manifest-layers", "There is no file config.json with the digest in model.config."
            )

    def _check_sizes(self) -> None:
        """Check that the size of each layer is possible, before a reader downloads it (FORMAT 3.4)."""
        k, dense = self.k, [self.scheme.dense_bounds(tensor.shape) for tensor in self.tensors]
        weights = sum(math.prod(t.shape) for t in self.tensors)
        # A safetensors file begins with 8 bytes for the size of its header.
        overhead = MAX_HEADER_BYTES + 8
        blocks = BLOCK_HASH_BYTES * sum(-(-self.layer(r).size_bytes // BLOCK_BYTES) for r in BLOCKED_ROLES)
        rank = 0 if self.adapter is None else self.adapter.rank
        # FORMAT 4.10: A may be stored in 2 or 4 bytes per number.
        frozen = rank * sum(t.shape[1] for t in self.tensors if t.count)  # numbers of A
        bounds = {
            Role.DENSE: (sum(least for least, _ in dense), sum(most for _, most in dense) + overhead),
            Role.PLAIN: (0, MAX_LAYER_BYTES),
            Role.BLOCKS: (blocks, blocks),
            Role.MASK: (4 * k, 4 * k + overhead),
            Role.ADAPTER: (2 * frozen, 4 * frozen + overhead),
            Role.VALUES: (2 * k, 4 * k + overhead),
            Role.REFERENCE: (0, MAX_REFERENCE_BYTES),
            Role.BASIS: (2 * k, MAX_COLUMNS * k + overhead),
            # At most 4 bytes per weight, 8 bytes per code of a table (a tied head occurs twice), and 32 bytes
            # per trained number (FORMAT 3.4).
            Role.PROGRAM: (
                PROGRAM_HEADER_BYTES,
                4 * weights + 8 * self.layer(Role.PLAIN).size_bytes + 32 * k + MAX_FILE_BYTES,
            ),
            Role.FILE: (0, MAX_FILE_BYTES),
        }
        for layer in self.layers:
            least, most = bounds[layer.role]
            if not least <= layer.size_bytes <= most:
                raise PackageError(
                    "layer-size",
                    f"expected a {layer.role} layer of {least} to {most} bytes, got {layer.size_bytes}",
                )


def sort_layers(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Return layers in the order of a manifest: by role, then by path."""
    roles = list(Role)
    return tuple(sorted(layers, key=lambda layer: (roles.index(layer.role), layer.path or "")))


def decimal_text(number: float) -> str:
    """Return a float as the shortest decimal text without an exponent.

    Example:
        >>> decimal_text(0.001)
        '0.001'
        >>> decimal_text(1e-05)
        '0.00001'
    """
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number!r}")
    return format(Decimal(repr(number)), "f")


# --- from JSON -------------------------------------------------------------------------------------------

_TOP = {
    "format": str,
    "version": int,
    "model": dict,
    "scheme": dict,
    "tensors": list,
    "layers": list,
    "lengths": dict,
    "provenance": dict,
}
_MODEL = {"family": str, "config": str}
_SCHEME = {"name": str, "group_size": int}
_MASK = {"method": str, "density": str, "scope": str, "k": int}
_ADAPTER = {"kind": str, "rank": int, "alpha": int, "scope": str, "k": int}
_LENGTHS = {"perturbation": str, "step": str}
_TENSOR = {"name": str, "shape": list, "count": int}
_LAYER = {"role": str, "media_type": str, "digest": str, "size_bytes": int, "path": object}


def _fields(value: object, what: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the fields of an object, which must have exactly these names and types."""
    if not isinstance(value, dict):
        raise PackageError("manifest-schema", f"expected {what} to be an object, got {type(value).__name__}")
    if value.keys() != kinds.keys():
        raise PackageError(
            "manifest-schema", f"expected {what} to have {sorted(kinds)}, got {sorted(value)!r:.300}"
        )
    for key, kind in kinds.items():
        # `type`, not `isinstance`: True must not pass for an integer.
        if kind is not object and type(value[key]) is not kind:
            got = type(value[key]).__name__
            raise PackageError("manifest-schema", f"expected {what}.{key} to be {kind.__name__}, got {got}")
    return value


def _adapter(item: object) -> AdapterInfo:
    found = _fields(item, "adapter", _ADAPTER)
    return AdapterInfo(**found | {"kind": _member(AdapterKind, found["kind"])})


def _lengths(item: object) -> Lengths:
    found = _fields(item, "lengths", _LENGTHS)
    try:
        numbers = {name: float.fromhex(text) for name, text in found.items()}
    except (ValueError, OverflowError) as exc:
        raise PackageError("manifest-schema", f"lengths must be hexadecimal, not {found!r:.200}") from exc
    # A number has other spellings, too, and a package only one digest.
    if found != {name: number.hex() for name, number in numbers.items()}:
        raise PackageError("manifest-schema", f"lengths are not spelled canonically: {found!r:.200}")
    return Lengths(**numbers)


def _tensor(item: object) -> TensorInfo:
    found = _fields(item, "tensor", _TENSOR)
    shape = found["shape"]
    if len(shape) != 2 or any(type(size) is not int for size in shape):
        raise PackageError("manifest-schema", f"expected a shape of two integers, got {shape!r:.100}")
    return TensorInfo(name=found["name"], shape=(shape[0], shape[1]), count=found["count"])


def _layer(item: object) -> Layer:
    found = _fields(item, "layer", _LAYER)
    role, path = _member(Role, found["role"]), found["path"]
    if path is not None and type(path) is not str:
        raise PackageError("manifest-schema", "expected layer.path to be null or text")
    if found["media_type"] != MEDIA_TYPES[role]:
        got = found["media_type"]
        raise PackageError("manifest-schema", f"expected media type {MEDIA_TYPES[role]}, got {got!r:.80}")
    return Layer(role=role, digest=found["digest"], size_bytes=found["size_bytes"], path=path)


def _member(kind: type[Member], value: object) -> Member:
    try:
        return kind(str(value))
    except ValueError as exc:
        raise PackageError("manifest-schema", f"expected a known {kind.__name__}, got {value!r:.60}") from exc


def _check_word(text: str) -> None:
    # These words reach logs and pages, so they cannot contain markup or control characters.
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.:-]{0,63}", text, re.ASCII):
        raise PackageError("manifest-schema", f"expected a short lower-case word, got {text!r:.80}")
