"""One user's text under one model's package, as the agent reads it. No torch, so that memory can be told."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.model_packages import Sources, installed_home, speaker_text
from edge_agent.data import DataReport, read_documents
from edge_agent.home import Home
from edge_agent.options import TrainOptions
from edge_agent.prepare import Prepared, prepare
from edge_agent.releases import installed_release
from edge_agent.training_job import package_tokenizer
from permille.errors import OperatorError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package

DENSITIES = {"stories260K-hf": 0.01, "reference-7M": 0.001}
_OTHER_DENSITY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class UserText:
    """A home with the model's package installed, and the rows that a run with this seed reads."""

    home: Home
    text: Path
    model_folder: Path
    package: Package
    prepared: Prepared
    row_tokens: int
    seed: int


def user_text(
    sources: Sources, model: str, speaker: str, seed: int, packages: Path, folder: Path
) -> UserText:
    """Make the home in `folder`; the package is made once in `packages`.

    Raises:
        OperatorError: no package was installed.
    """
    home = installed_home(folder, sources, model, packages, DENSITIES.get(model, _OTHER_DENSITY))
    release = installed_release(home)
    if release is None:
        raise OperatorError(f"expected an installed package in {folder}, found none")
    package = Package.open(BlobFolder(home.blobs), release.manifest_digest)
    text = speaker_text(sources, speaker, folder)
    documents, _ = read_documents([text])
    positions = int(package.config["max_position_embeddings"])
    row_tokens = TrainOptions(steps=1).within(positions).row_tokens
    prepared = prepare(documents, package_tokenizer(package), DataReport(), seed=seed, row_tokens=row_tokens)
    return UserText(
        home=home,
        text=text,
        model_folder=sources.models / model,
        package=package,
        prepared=prepared,
        row_tokens=row_tokens,
        seed=seed,
    )
