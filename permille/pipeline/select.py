"""The third step: select the weights to train, and report on the mask.

    chosen = select(checkpoint, MaskChoice(density=0.001), scored.tensors)
    made = write_choice(blobs, model, MaskChoice(density=0.001), chosen, scored)

This module needs no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.choices import MaskMethod
from permille.digests import JSON
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask
from permille.package.layers import write_mask
from permille.package.manifest import decimal_text
from permille.package.safetensors_io import SafetensorsFile
from permille.pipeline.inputs import Made, Progress, SourceModel, silent, versions
from permille.sensitivity.coverage import mask_report
from permille.sensitivity.masks import select_mask

Tensors = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskChoice:
    """Way to select weights. `seed` is for the method `random`, or it drew the sequences."""

    method: MaskMethod = MaskMethod.FISHER
    density: float
    scope: str = "all"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Scores by tensor, their origin, and the reports on the corpus and on the base."""

    tensors: Tensors
    provenance: dict[str, JSON]
    read: Mapping[str, object]
    base: Mapping[str, object]


def select(checkpoint: Checkpoint, choice: MaskChoice, scores: Tensors | None = None) -> ChosenMask:
    """Select weights by scores, or without scores by size or chance.

    Zeros of a sparse model stay zeros: they are never selected. Errors are those of `select_mask`.
    """
    weights = checkpoint.weights(choice.scope)
    ranked = weights if scores is None else scores
    indices = select_mask(ranked, choice.method, choice.density, choice.seed, weights=weights)
    return ChosenMask(indices=indices, method=choice.method.value, density=choice.density, scope=choice.scope)


def write_choice(
    blobs: BlobFolder,
    model: SourceModel,
    choice: MaskChoice,
    scored: Scored | None = None,
    progress: Progress = silent,
) -> Made:
    """Select weights, and store them as a layer. Return it with its origin and a report."""
    progress(0.9, "selecting")
    scores = None if scored is None else scored.tensors
    chosen = select(model.checkpoint, choice, scores)
    order = [name for name, _ in scoped_tensors(model.checkpoint.config)]
    layer = write_mask(blobs, chosen.indices, order)
    progress(0.95, "reporting")
    weights = model.checkpoint.weights(choice.scope)
    report = mask_report(_Shown(weights, scores), chosen.indices)
    provenance: dict[str, JSON] = {
        "model": model.provenance,
        "method": choice.method.value,
        "density": decimal_text(choice.density),
        "scope": choice.scope,
        "seed": choice.seed,
        "mask": layer.digest,
        "versions": versions(),
        **(scored.provenance if scored else {}),
    }
    content = {
        **report,
        "score": "fisher" if scored else "magnitude",
        "corpus": scored and scored.read,
        "base": scored and scored.base,
        "provenance": provenance,
    }
    return Made(layers=(layer,), provenance=provenance, report=content)


def read_mask(blobs: BlobFolder, digest: str) -> dict[str, NDArray[np.uint32]]:
    """Check the digest of a stored mask layer, and return its indices by tensor.

    Raises:
        PackageError: the blob is missing or damaged.
    """
    blobs.check(digest)
    file = SafetensorsFile(blobs.path(digest), dtypes=["U32"])
    return {name: file.tensor(name).data.view("<u4").astype(np.uint32) for name in file.names}


class _Shown(Mapping[str, NDArray[np.float32]]):
    """The numbers that the report describes, computed for one tensor at a time.

    With scores, the numbers are the scores. But a weight that is 0 has the number 0, because a mask never
    selects it. Without scores, the numbers are the absolute values of the weights.
    """

    def __init__(self, weights: Tensors, scores: Tensors | None) -> None:
        self._weights = weights
        self._scores = scores

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        weights = self._weights[name]
        return np.abs(weights) if self._scores is None else self._scores[name] * (weights != 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
