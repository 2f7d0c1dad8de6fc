"""The last step: write a package of chosen weights and quantized layers, with its reference and lengths.

The reference has rows of public text and answers of the base model. With its rows, a device keeps a trained
model close to the base model, and measures what the training costs on general text. The lengths are those of
zeroth order (`permille.training.lengths`). The finished package is
read and verified in the same way as on a device.
"""

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from permille.digests import JSON
from permille.engines.light.engine import LightEngine
from permille.models.checkpoint import Checkpoint
from permille.models.settings import within_positions
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenAdapter, ChosenMask, write_layers, write_manifest
from permille.package.manifest import Layer, Manifest, Quantization
from permille.package.reader import Package, verify_package
from permille.pipeline.draw import Drawn, Sampling
from permille.pipeline.inputs import Progress, silent
from permille.training.lengths import measure_lengths
from permille.training.reference import REFERENCE_SEED, TEXT_ROWS, TEXT_TOKENS, make_reference


def reference_sampling(config: Mapping[str, Any]) -> Sampling:
    """Return the choice of the reference's text. The seed is fixed, so the same text gives the same rows."""
    length = within_positions(config, TEXT_TOKENS)
    return Sampling(number=TEXT_ROWS, length=length, seed=REFERENCE_SEED)


def pack(
    blobs: BlobFolder,
    checkpoint: Checkpoint,
    chosen: ChosenMask | ChosenAdapter,
    layers: tuple[Layer, ...],
    how: Quantization,
    *,
    text: Drawn | None,
    provenance: Mapping[str, JSON] = {},
    made: Mapping[str, JSON] = {},
    work: Path | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> Package:
    """Write a package, verify it as a device does, and open it.

    Args:
        layers: the dense and the plain layer.
        text: rows for the reference. Without text, a chat model gets a reference of questions only, and other
            models get none.
        provenance: the origin of the parts, for the manifest.
        made: the origin of the reference.
        work: a folder for finished measurements, with which another call resumes. None keeps nothing.
        threads: the number of threads. None uses all cores.

    Raises:
        InputError: the weights do not fit the model, or the light engine cannot compute it.
        PackageError: a stored part is damaged, or a package may not contain a file of the model.
    """
    dense, plain = layers
    progress(0.05, "writing the layers")
    manifest = write_layers(blobs, checkpoint, chosen, (dense, plain), how, provenance=provenance)
    progress(0.1, "asking the model for the reference")
    manifest = _with_reference(blobs, checkpoint, manifest, text, made, threads)
    package, measured = Package(blobs, manifest), count()
    manifest = measure_lengths(
        LightEngine(package, threads=threads),
        package,
        work=work,
        # Most packages need four measurements.
        progress=lambda what: progress(min(0.35 + 0.15 * next(measured), 0.9), f"measuring {what}"),
    )
    digest = write_manifest(blobs, manifest)
    progress(0.95, "verifying")
    return verify_package(blobs, digest)


def _with_reference(
    blobs: BlobFolder,
    checkpoint: Checkpoint,
    manifest: Manifest,
    text: Drawn | None,
    made: Mapping[str, JSON],
    threads: int | None,
) -> Manifest:
    from permille.models.loading import FileChat

    chat = FileChat.find(checkpoint.folder)
    text_NT = np.empty((0, TEXT_TOKENS), np.int64) if text is None else text.tokens_NT
    if chat is None and len(text_NT) < 2:
        return manifest
    if text is not None and text.provenance:
        made = {**made, "corpus": text.provenance}
    return make_reference(Package(blobs, manifest), text_NT=text_NT, chat=chat, made=made, threads=threads)
