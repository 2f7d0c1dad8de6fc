"""Packages of real models for benchmarks. Masks are selected by Fisher scores on C4.

By default, embeddings keep the dtype of the model, as in earlier measurements.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from permille.choices import Embeddings
from permille.models.checkpoint import Checkpoint
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenAdapter, ChosenMask, pack_model
from permille.package.reader import Package
from permille.quantization.types import Scheme

DENSITIES = {"stories260K-hf": 0.01, "reference-7M": 0.001}
_OTHER_DENSITY = 0.001
_SEQUENCES, _LENGTH = 64, 128
SMOLLM2_FILE = Path("build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
"""The model that `make smollm2` downloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The places of models and texts.

    Attributes:
        models: folder of transformers folders.
        data: folder with `text/c4_en/c4_sample.jsonl` and `users/`.
    """

    models: Path
    data: Path


def sources_from_environment() -> Sources:
    """Return the folders in PERMILLE_MODELS and PERMILLE_DATA.

    Raises:
        SystemExit: a variable is not set.
    """
    return Sources(
        models=folder_from_environment("PERMILLE_MODELS"), data=folder_from_environment("PERMILLE_DATA")
    )


def folder_from_environment(name: str) -> Path:
    """Read a folder's path from an environment variable.

    Raises:
        SystemExit: the variable is not set.
    """
    try:
        return Path(os.environ[name])
    except KeyError as exc:
        raise SystemExit(f"Set {name} to the folder that holds the data.") from exc


def model_package(
    sources: Sources,
    model: str,
    folder: Path,
    *,
    scheme: Scheme = Scheme.NF4,
    group_size: int | None = None,
    trained: float | ChosenAdapter | None = None,
    embeddings: Embeddings = Embeddings.SOURCE,
) -> Package:
    """Return the package of a model with an adapter, or with a mask by Fisher scores on C4.

    The package is made once in `folder` and then reused.

    Args:
        trained: an adapter, or the density of the mask. The default is that of `DENSITIES`, or 0.001.
        embeddings: format of the embedding and the head.
    """
    trained = DENSITIES.get(model, _OTHER_DENSITY) if trained is None else trained
    blobs = BlobFolder(folder / "blobs")
    name = trained if isinstance(trained, float) else f"{trained.kind}-{trained.rank}-{trained.alpha}"
    how = scheme.value if group_size is None else f"{scheme}-{group_size}"
    stored = "" if embeddings is Embeddings.SOURCE else f"-{embeddings}"
    known = folder / f"{model}-{name}-{how}{stored}.digest"
    if not known.exists():
        digest = _written(blobs, sources, model, trained, (scheme, group_size, embeddings))
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(digest)
    return Package.open(blobs, known.read_text())


def _written(
    blobs: BlobFolder,
    sources: Sources,
    model: str,
    trained: float | ChosenAdapter,
    how: tuple[Scheme, int | None, Embeddings],
) -> str:
    scheme, group_size, embeddings = how
    blobs.root.mkdir(parents=True, exist_ok=True)
    if not isinstance(trained, float):
        return pack_model(
            blobs,
            Checkpoint(sources.models / model),
            trained,
            scheme,
            group_size=group_size,
            embeddings=embeddings,
        )
    # Imported here, because processes that only open the package have their memory measured without torch.
    from permille.choices import MaskMethod
    from permille.corpora.sequences import token_sequences
    from permille.corpora.sources import ReadReport, file_texts
    from permille.models.loading import FileTokenizer, load_model
    from permille.sensitivity.fisher import fisher_scores
    from permille.sensitivity.masks import select_mask

    path = sources.models / model
    texts = file_texts(sources.data / "text/c4_en/c4_sample.jsonl", ReadReport())
    sequences_NT = token_sequences(FileTokenizer(path), texts, _SEQUENCES, _LENGTH, 0)
    scores = fisher_scores(load_model(path), sequences_NT)
    mask = select_mask(scores, MaskMethod.FISHER, trained)
    chosen = ChosenMask(indices=mask, method="fisher", density=trained)
    return pack_model(
        blobs,
        Checkpoint(path),
        chosen,
        scheme,
        group_size=group_size,
        embeddings=embeddings,
    )
