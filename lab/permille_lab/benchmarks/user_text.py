"""One user's text under one model's package, as the agent reads it. No torch, so that memory can be told."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from permille.errors import OperatorError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.quantization import Scheme
from permille_agent.state.home import Home, open_home
from permille_agent.state.releases import InstalledRelease, installed_release, record_installed
from permille_agent.text.preparation import Prepared, prepare
from permille_agent.text.reading import read_documents
from permille_agent.training.options import TrainOptions
from permille_agent.training.train import package_tokenizer
from permille_lab.benchmarks.model_packages import Sources, installed_home, speaker_text

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
    sources: Sources,
    model: str,
    speaker: str,
    seed: int,
    packages: Path,
    folder: Path,
    *,
    learned: bool = False,
    scheme: Scheme = Scheme.NF4,
) -> UserText:
    """Make the home in `folder`; the package is made once in `packages`.

    Args:
        scheme: of the package without learned directions.
        learned: the package that carries learned directions and exponents beside all else.

    Raises:
        OperatorError: no package was installed.
    """
    if learned:
        home = _layered_home(folder, sources, model, packages / "layered")
    else:
        density = DENSITIES.get(model, _OTHER_DENSITY)
        home = installed_home(folder, sources, model, packages, density, scheme)
    release = installed_release(home)
    if release is None:
        raise OperatorError(f"expected an installed package in {folder}, found none")
    package = Package.open(BlobFolder(home.blobs), release.manifest_digest)
    text = speaker_text(sources, speaker, folder)
    documents, _ = read_documents([text])
    positions = int(package.config["max_position_embeddings"])
    row_tokens = TrainOptions(steps=1).within(positions).row_tokens
    prepared = prepare(documents, package_tokenizer(package), seed=seed, row_tokens=row_tokens)
    return UserText(
        home=home,
        text=text,
        model_folder=sources.models / model,
        package=package,
        prepared=prepared,
        row_tokens=row_tokens,
        seed=seed,
    )


def _layered_home(folder: Path, sources: Sources, model: str, packages: Path) -> Home:
    # Here, so that runs on a package without such layers depend on nothing that makes them.
    from permille_lab.benchmarks.estimators import layered_model_package

    package = layered_model_package(sources, model, packages)
    home = open_home(folder)
    shutil.copytree(package.blobs.root, home.blobs, dirs_exist_ok=True)
    record_installed(home, InstalledRelease(name="benchmark", version=1, manifest_digest=package.digest))
    return home
