"""Packages of real models for benchmarks: scored on public text, written by the library."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from permille.package.limits import FILE_NAMES
from permille.package.reader import Package
from permille.quantization import Scheme
from permille_agent.state.home import Home, open_home
from permille_agent.state.releases import InstalledRelease, record_installed
from tests.packages import write_package


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where models and texts are.

    Attributes:
        models: transformers folders by name.
        data: holds `text/c4_en/c4_sample.jsonl` and `users/shakespeare/tinyshakespeare_by_speaker.jsonl`.
    """

    models: Path
    data: Path

    @property
    def corpus(self) -> Path:
        """JSON lines with `text`, for scores."""
        return self.data / "text/c4_en/c4_sample.jsonl"


def sources_from_environment() -> Sources:
    """The folders that PERMILLE_MODELS and PERMILLE_DATA name.

    Raises:
        SystemExit: one of them is not set.
    """
    try:
        return Sources(models=Path(os.environ["PERMILLE_MODELS"]), data=Path(os.environ["PERMILLE_DATA"]))
    except KeyError as exc:
        raise SystemExit(f"expected the environment variable {exc.args[0]} to name a folder") from exc


def package_of_model(
    folder: Path,
    blobs: Path,
    corpus: Path,
    *,
    density: float,
    sequences: int = 64,
    length: int = 128,
    scheme: Scheme = Scheme.NF4,
) -> Package:
    """The package of the model in `folder`, with the mask that Fisher scores on `corpus` select.

    Args:
        folder: a transformers folder with safetensors.
        blobs: the blob folder to write into.
        corpus: JSON lines with `text`.
        density: share of the weights that is masked.
        sequences: how many sequences are scored.
        length: their tokens.
    """
    # Here, so that who finds the package made needs no torch.
    from permille.models.loading import load_model
    from permille.sensitivity.fisher import fisher_scores
    from permille.sensitivity.masks import MaskMethod, select_mask

    model = load_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scores = fisher_scores(model, _sequences(tokenizer, corpus, sequences, length))
    mask = select_mask(scores, MaskMethod.FISHER, density)
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: np.array(weight.detach().numpy(), dtype=np.float32) for name, weight in model.named_parameters()
    }
    names = sorted(FILE_NAMES - {"config.json"})
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    return write_package(blobs, config, weights, mask, files, scheme=scheme, method="fisher")


def _sequences(tokenizer: Tokenizer, corpus: Path, count: int, length: int) -> NDArray[np.int64]:
    found = []
    for text in _texts(corpus):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        found += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        if len(found) >= count:
            break
    return np.array(found[:count], dtype=np.int64)


def _texts(corpus: Path) -> Iterator[str]:
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def installed_home(
    home_folder: Path,
    sources: Sources,
    model: str,
    packages: Path,
    density: float,
    scheme: Scheme = Scheme.NF4,
) -> Home:
    """A home with the package of `model` installed; what was made before in `packages` is used again."""
    if scheme is not Scheme.NF4:
        packages /= scheme.value
    packages.mkdir(parents=True, exist_ok=True)
    known = packages / f"{model}-{density}.digest"
    if not known.exists():
        folder = sources.models / model
        package = package_of_model(folder, packages / "blobs", sources.corpus, density=density, scheme=scheme)
        known.write_text(package.digest)
    home = open_home(home_folder)
    shutil.copytree(packages / "blobs", home.blobs, dirs_exist_ok=True)
    record_installed(home, InstalledRelease(name="benchmark", version=1, manifest_digest=known.read_text()))
    return home


def speaker_text(sources: Sources, speaker: str, folder: Path) -> Path:
    """The speeches of one of Shakespeare's speakers as JSON lines: one user."""
    source = sources.data / "users/shakespeare/tinyshakespeare_by_speaker.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    (speeches,) = [row["text"] for row in rows if row["user"] == speaker]
    path = folder / "user.jsonl"
    path.write_text("".join(json.dumps({"text": speech}) + "\n" for speech in speeches))
    return path
