"""What the tests of runs share: a home with an installed tiny package, a user's text, quick options."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.package.reader import Package
from permille_agent.state.home import Home, open_home
from permille_agent.state.releases import InstalledRelease, record_installed
from permille_agent.text.preparation import prepare
from permille_agent.text.reading import read_documents
from permille_agent.text.rows import TrainingBatches
from permille_agent.training.options import TrainOptions
from permille_agent.training.setup import Setup, training_exponents
from permille_agent.training.train import package_tokenizer
from tests.packages import sentences, tiny_package

QUICK = TrainOptions(seed=0, steps=12, queries=4, batch_rows=2, row_tokens=32)


def home_with_package(root: Path, *, seed: int = 0, version: int = 1) -> tuple[Home, Package]:
    """A home folder with a tiny package installed."""
    home = open_home(root)
    package = tiny_package(home.blobs, seed=seed)
    record_installed(home, InstalledRelease(name="tiny", version=version, manifest_digest=package.digest))
    return home, package


def user_text(folder: Path, count: int = 320, *, seed: int = 3) -> Path:
    """A file of a user who writes about days and rivers."""
    path = folder / "user.txt"
    path.write_text("\n\n".join(sentences(count, seed=seed)))
    return path


def setup_of(
    package: Package, engine: Engine, text: Path, options: TrainOptions = QUICK, **changes: Any
) -> Setup:
    """Everything that the phases of a run work with."""
    options = replace(options, **changes)
    documents, _ = read_documents([text])
    tokenizer = package_tokenizer(package)
    prepared = prepare(documents, tokenizer, seed=options.seed, row_tokens=options.row_tokens)
    base_K: NDArray[np.float32] = package.values()
    return Setup(
        engine=engine,
        package_digest=package.digest,
        mask_digest=package.mask_digest,
        counts=package.counts,
        w_base_K=base_K,
        prepared=prepared,
        options=options,
        batches=TrainingBatches(prepared.train, batch_rows=options.batch_rows, seed=options.seed),
        exponents=training_exponents(package, options),
        decoder_layers=int(package.config["num_hidden_layers"]),
    )
