"""Build a package from a model, a mask or adapter, and a quantization scheme.

This is the last step of a build job, and the entry point for notebooks. It works tensor by tensor,
so a model need not fit into memory. It uses no clock: the same inputs give the same package.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from permille.choices import AdapterKind, Embeddings, choice_of
from permille.digests import JSON
from permille.errors import InputError
from permille.models.families import family_of, scoped_tensors, table_names
from permille.package.blobs import BlobFolder
from permille.package.blocks import write_blocks
from permille.package.config_files import clean_config, config_bytes
from permille.package.layers import (
    masked_values,
    write_adapter,
    write_dense,
    write_file,
    write_mask,
    write_plain,
    write_values,
)
from permille.package.limits import FILE_NAMES, MAX_FILE_BYTES
from permille.package.manifest import (
    AdapterInfo,
    Layer,
    Manifest,
    MaskInfo,
    ModelInfo,
    Quantization,
    TensorInfo,
    decimal_text,
    sort_layers,
)
from permille.package.reader import Package
from permille.quantization import default_group_size, quantize
from permille.quantization.tables import code_table
from permille.quantization.types import QuantizedTensor, Scheme
from permille.tensors import RawTensor

Coded = Iterator[tuple[str, QuantizedTensor]]
_Trainable = tuple[MaskInfo | AdapterInfo, tuple[TensorInfo, ...], list[Layer]]
_NONE = np.empty(0, np.uint32)


class SourceModel(Protocol):
    """The model to package: a `permille.models.checkpoint.Checkpoint`, or tensors in memory."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's `config.json`."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors, as `permille.models.families.expected_tensors` lists them."""

    def raw(self, name: str) -> RawTensor:
        """Return a tensor in the model's own dtype."""

    def file(self, name: str, *, limit: int) -> bytes | None:
        """Return a file of the tokenizer or the license, of at most `limit` bytes, or None."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenMask:
    """The masked weights, and how they were chosen, for the manifest.

    Attributes:
        indices: strictly increasing flat indices by tensor. Tensors without masked weights may be missing.
    """

    indices: Mapping[str, NDArray[np.uint32]] = field(repr=False)  # thousands of numbers
    method: str
    density: float | str
    scope: str = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAdapter:
    """The adapter to train instead of masked weights (FORMAT 4.10). `seed` fixes its random matrices A."""

    kind: AdapterKind
    rank: int
    alpha: int
    scope: str = "all"
    seed: int = 0


def pack_model(
    blobs: BlobFolder,
    model: SourceModel,
    chosen: ChosenMask | ChosenAdapter,
    scheme: Scheme = Scheme.NF4,
    *,
    group_size: int | None = None,
    embeddings: Embeddings = Embeddings.Q8_0,
    codes: Callable[[str], QuantizedTensor] | None = None,
    provenance: Mapping[str, JSON] | None = None,
) -> str:
    """Quantize a model, collect the values to train, and write the package. Return its digest.

    Args:
        group_size: None takes the scheme's default.
        embeddings: how the embedding and the head are stored.
        codes: a function that returns the codes of a tensor by its name. Scheme `source` needs it
            (`permille.models.gguf.codes`).

    Raises:
        InputError: the mask or the adapter does not fit the model, weights are not finite, or a
            file is too large.
        PackageError: a package may not contain a file of the model.
        OSError: from the file system.

    Example:

        mask = ChosenMask(indices=indices, method="magnitude", density=0.001)
        digest = pack_model(BlobFolder(Path("blobs")), model, mask, Scheme.NF4)
    """
    size = default_group_size(scheme) if group_size is None else group_size
    how = Quantization(name=scheme, group_size=size)
    layers = write_weights(blobs, model, coded_tensors(model, how, codes), how, embeddings)
    return write_package(blobs, model, chosen, layers, how, provenance=provenance).digest


def coded_tensors(
    model: SourceModel, how: Quantization, codes: Callable[[str], QuantizedTensor] | None = None
) -> Coded:
    """Yield the codes of all linear layers, in the model's order. One weight is in memory at a time.

    Args:
        codes: as for `pack_model`. None rounds the weights to the nearest codes.

    Raises:
        InputError: as for `quantize`.
    """
    for name, _ in scoped_tensors(model.config):
        if codes is not None:
            yield name, codes(name)
        else:
            yield name, quantize(model.raw(name).float32(), how.name, how.group_size, name=name)


def write_weights(
    blobs: BlobFolder, model: SourceModel, coded: Coded, how: Quantization, embeddings: Embeddings
) -> tuple[Layer, Layer]:
    """Write the dense layer with the codes, and the plain layer with all other tensors."""
    return write_dense(blobs, coded, how), write_plain(blobs, plain_tensors(model, embeddings))


def write_package(
    blobs: BlobFolder,
    model: SourceModel,
    chosen: ChosenMask | ChosenAdapter,
    layers: tuple[Layer, Layer],
    scheme: Quantization,
    *,
    provenance: Mapping[str, JSON] | None = None,
) -> Manifest:
    """Write the manifest of a package and all its layers except the dense and the plain one, which exist.

    Return the manifest.

    Raises:
        InputError, PackageError, OSError: as for `pack_model`.
    """
    manifest = write_layers(blobs, model, chosen, layers, scheme, provenance=provenance)
    write_manifest(blobs, manifest)
    return manifest


def write_layers(
    blobs: BlobFolder,
    model: SourceModel,
    chosen: ChosenMask | ChosenAdapter,
    layers: tuple[Layer, Layer],
    scheme: Quantization,
    *,
    provenance: Mapping[str, JSON] | None = None,
) -> Manifest:
    """Write all layers of a package except the dense and the plain one, which exist.

    Return the manifest without storing it, so that a caller can add to it.

    Raises:
        InputError, PackageError, OSError: as for `pack_model`.
    """
    if isinstance(chosen, ChosenMask):
        trainable, tensors, own = _write_mask(blobs, model, chosen)
    else:
        trainable, tensors, own = _write_adapter(blobs, model, chosen)
    # A reader refuses keys outside of the allow-list (FORMAT 3.3), so remove them.
    config = write_file(blobs, "config.json", config_bytes(clean_config(model.config)))
    return Manifest(
        model=ModelInfo(family=family_of(model.config).value, config=config.digest),
        scheme=scheme,
        trainable=trainable,
        tensors=tensors,
        layers=sort_layers([*layers, write_blocks(blobs, layers), *own, config, *_other_files(blobs, model)]),
        provenance=provenance or {},
    )


def write_manifest(blobs: BlobFolder, manifest: Manifest) -> str:
    """Check the package, store its manifest, and return its digest. Its layers must be stored already.

    Raises:
        PackageError: `blob-missing`, or a check of `Package` fails.
    """
    # Opening a package checks it. Do this before the manifest is stored, so that no broken package is stored.
    Package(blobs, manifest)
    return blobs.put_bytes(manifest.to_bytes())


def plain_tensors(model: SourceModel, embeddings: Embeddings | str = Embeddings.Q8_0) -> Iterator[RawTensor]:
    """Yield all tensors except the linear layers of the decoder layers, in the model's order.

    Args:
        embeddings: how the embedding and the head are stored.
    """
    embeddings = choice_of(Embeddings, embeddings, "embeddings")
    scoped = {name for name, _ in scoped_tensors(model.config)}
    tables = table_names(model.config) if embeddings is Embeddings.Q8_0 else ()
    for name in model.names:
        if name not in scoped:
            yield code_table(model.raw(name)) if name in tables else model.raw(name)


def _write_mask(blobs: BlobFolder, model: SourceModel, mask: ChosenMask) -> _Trainable:
    scoped = dict(scoped_tensors(model.config))
    masks = {name: mask.indices.get(name, _NONE) for name in scoped}
    # FORMAT 4.4: every linear layer has an entry in the mask, even if none of its weights is masked.
    counts = {name: indices.size for name, indices in masks.items()}
    values = (masked_values(model.raw(name), indices) for name, indices in masks.items())
    own = [write_mask(blobs, mask.indices, list(scoped)), write_values(blobs, values, list(scoped))]
    about = MaskInfo(
        method=mask.method,
        density=decimal_text(float(mask.density)),
        scope=mask.scope,
        k=sum(counts.values()),
    )
    tensors = (TensorInfo(name=name, shape=shape, count=counts[name]) for name, shape in scoped.items())
    return about, tuple(tensors), own


def _write_adapter(blobs: BlobFolder, model: SourceModel, chosen: ChosenAdapter) -> _Trainable:
    covered = dict(scoped_tensors(model.config, chosen.scope))
    # `k` is 0 here, and set at the end, when all counts are known.
    about = AdapterInfo(kind=chosen.kind, rank=chosen.rank, alpha=chosen.alpha, scope=chosen.scope, k=0)
    for name, (rows, columns) in covered.items():
        # FORMAT 3.2: a count is at most the number of weights.
        if about.count((rows, columns)) > rows * columns:
            raise InputError(
                f"An adapter of rank {chosen.rank} has more numbers than {name} ({rows} by {columns}). "
                "Choose a lower rank, or a scope without this layer."
            )
    tensors = tuple(
        TensorInfo(name=name, shape=shape, count=about.count(shape) if name in covered else 0)
        for name, shape in scoped_tensors(model.config)
    )
    layer = write_adapter(blobs, about, tensors, seed=chosen.seed)
    return replace(about, k=sum(tensor.count for tensor in tensors)), tensors, [layer]


def _other_files(blobs: BlobFolder, model: SourceModel) -> Iterator[Layer]:
    # `write_layers` writes the cleaned config, so the model's own config.json is left out here.
    for name in sorted(FILE_NAMES - {"config.json"}):
        data = model.file(name, limit=MAX_FILE_BYTES)
        if data is not None:
            yield write_file(blobs, name, data)
