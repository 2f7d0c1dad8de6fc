"""Inputs of the steps: an opened model, and the progress that a step reports."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from permille.digests import JSON
from permille.models.checkpoint import Checkpoint
from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille.package.manifest import Layer
from permille.version import __version__

if TYPE_CHECKING:
    from permille.models.gguf.codes import KeptModel

_DESCRIPTION_BYTES = 64 << 20
Progress = Callable[[float, str], None]
"""A function that gets the fraction of a step that is done, and a message. An exception stops the step."""


def silent(_fraction: float, _message: str) -> None:
    """Ignore all progress."""


def part(progress: Progress, begin: float, end: float, what: str) -> Callable[[int, int], None]:
    """Return a callback for a part of a step, which runs from the fraction `begin` to `end`.

    The callback gets the work that is done and the total. Its message is `what done/total`.

    Example:
        fisher_scores(model, tokens_NT, scope, progress=part(progress, 0.05, 0.9, "fisher"))
    """

    def report(done: int, total: int) -> None:
        progress(begin + (end - begin) * done / total, f"{what} {done}/{total}")

    return report


@dataclass(frozen=True, kw_only=True)
class SourceModel:
    """A model whose files have been checked.

    Attributes:
        provenance: the origin of the files, and their digest.
        gguf: the GGUF file from which the checkpoint was made, or None.
    """

    checkpoint: Checkpoint
    provenance: dict[str, JSON]
    gguf: Path | None = None

    @cached_property
    def kept(self) -> "KeptModel | None":
        """The model together with its GGUF file, or None without such a file."""
        if self.gguf is None:
            return None
        from permille.models.gguf.codes import KeptModel

        return KeptModel(self.checkpoint, self.gguf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Result of a step: layers, their origin for the manifest, and a report for people."""

    layers: tuple[Layer, ...]
    provenance: dict[str, JSON]
    report: Mapping[str, object] = field(repr=False)

    def put(self, blobs: BlobFolder) -> str:
        """Store a description of the result beside its layers. Return the digest of the description."""
        layers = [[layer.role, layer.digest, layer.size_bytes] for layer in self.layers]
        described = {"layers": layers, "provenance": self.provenance, "report": self.report}
        return blobs.put_bytes(json.dumps(described, sort_keys=True).encode())

    @classmethod
    def stored(cls, blobs: BlobFolder, digest: str) -> "Made":
        """Read what `put` stored. Raises PackageError if a blob is missing or damaged."""
        described = json.loads(blobs.read(digest, limit=_DESCRIPTION_BYTES))
        layers = (
            Layer(role=Role(role), digest=of, size_bytes=size) for role, of, size in described["layers"]
        )
        return cls(layers=tuple(layers), provenance=described["provenance"], report=described["report"])


def versions(*libraries: str) -> dict[str, JSON]:
    """Return the versions of permille, NumPy and the named libraries.

    Another version of one of these can change the bits of a result.
    """
    found: dict[str, JSON] = {name: version(name) for name in sorted(libraries)}
    return {**found, "permille": __version__, "numpy": np.__version__}
