"""Public interface for programs that embed the agent. For example, training with a home folder:

    home = open_home(Path("home"))
    install_package(home, package)
    result = run_training(home, [Path("notes")], TrainOptions(minutes=20))

Training without a home folder, for a program that stores models itself:

    documents, report = read_documents([Path("notes")])
    prepared = prepare(documents, package_tokenizer(package), row_tokens=128)
    result = personalise(package, engine, prepared, TrainOptions(steps=500), folder=Path("run"))
    losses = document_losses(engine, result.values_K, prepared.test, len(prepared.test_documents))

Answers with passages of the user's text, which the home's index holds:

    index_text(home, documents, [Path("notes")])
    with LocalModel(home, EngineChoice(), notes=True) as model:
        generated, pieces = model.reply([("user", "What is my cat called?")], model.variants[0], Sampling())

Extensions add names, such as these for the rounds of a federation, on an enrolled device:

    join_federation(home, "readers")
    took = take_part(home, [Path("notes")])
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.training.reference import Reference
from permille.zo.lattice import values
from permille_agent.link.extension import agent_extensions
from permille_agent.link.install import install
from permille_agent.local.model import LocalModel, Sampling
from permille_agent.local.show import show_run
from permille_agent.state.home import Home, default_root, open_home, telling_disk
from permille_agent.state.models import InstalledRelease, active_model, require_active
from permille_agent.text.documents import Document, Learn, characters
from permille_agent.text.notes import index_text
from permille_agent.text.preparation import NEEDED_TOKENS, Prepared, prepare
from permille_agent.text.reading import read_documents
from permille_agent.text.report import DataReport
from permille_agent.text.rows import (
    Row,
    TrainingBatches,
    batch_of,
    document_rows,
    evaluation_batches,
    packed_rows,
)
from permille_agent.text.tokens import TextTokenizer, TokenizedDocument, package_tokenizer
from permille_agent.training.answers import BaseAnswers, base_answers, compare_answers
from permille_agent.training.engines import ANY_ENGINE, EngineChoice
from permille_agent.training.evaluation import (
    DocumentLosses,
    document_losses,
    mean_loss,
)
from permille_agent.training.evidence import Comparison, compare_losses
from permille_agent.training.memory import memory_share, memory_tokens
from permille_agent.training.options import RunContext, TrainOptions
from permille_agent.training.outcome import RunOutcome
from permille_agent.training.personal import model_values
from permille_agent.training.plan import RunFailed, make_plan
from permille_agent.training.run import Evaluation, Run, RunClock, RunFolder, list_runs
from permille_agent.training.steps import train
from permille_agent.training.train import run_training

__all__ = [
    "ANY_ENGINE",
    "NEEDED_TOKENS",
    "BaseAnswers",
    "Comparison",
    "DataReport",
    "Document",
    "DocumentLosses",
    "EngineChoice",
    "Evaluation",
    "Home",
    "Learn",
    "LocalModel",
    "Personalised",
    "Prepared",
    "Row",
    "RunContext",
    "RunFailed",
    "RunFolder",
    "RunOutcome",
    "Sampling",
    "TextTokenizer",
    "TokenizedDocument",
    "TrainOptions",
    "TrainingBatches",
    "active_model",
    "base_answers",
    "batch_of",
    "characters",
    "compare_answers",
    "compare_losses",
    "default_root",
    "document_losses",
    "document_rows",
    "evaluation_batches",
    "index_text",
    "install_package",
    "list_runs",
    "mean_loss",
    "memory_share",
    "memory_tokens",
    "model_values",
    "open_home",
    "package_tokenizer",
    "packed_rows",
    "personalise",
    "prepare",
    "read_documents",
    "require_active",
    "run_training",
    "show_run",
    "telling_disk",
]


def __getattr__(name: str) -> Any:
    """Return what an extension adds to this interface."""
    for extension in agent_extensions():
        if name in extension.embedded:
            return extension.embedded[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Personalised:
    """Result of `personalise`.

    Attributes:
        values_K: values of the masked weights with the selected state, float32 [k].
        step: number of steps up to the selected state. 0 is the start.
        steps: number of all steps of the descent that the selected state comes from.
        learning_rate: first learning rate of this descent. Each new descent halves it.
        epsilon: scale of the perturbations.
        curve: losses of this descent on the select split, beginning with the start.
    """

    values_K: NDArray[np.float32]
    step: int
    steps: int
    learning_rate: float
    epsilon: float
    curve: tuple[Evaluation, ...]


def install_package(home: Home, package: Package, *, release: str = "local", version: int = 1) -> None:
    """Copy a package into a home folder, check it in a trial, and make it the installed one.

    For example, `install_package(open_home(Path("home")), package)`.
    """
    blobs = BlobFolder(home.blobs)
    for digest in (package.digest, *(layer.digest for layer in package.manifest.layers)):
        if not blobs.has(digest):
            blobs.put_file(package.blobs.path(digest), expected=digest)
    installed = InstalledRelease(name=release, version=version, manifest_digest=package.digest)
    install(home, installed, size_bytes=package.size_bytes)


def personalise(
    package: Package,
    engine: Engine,
    prepared: Prepared,
    options: TrainOptions,
    *,
    folder: Path,
    start_K: NDArray[np.float32] | None = None,
) -> Personalised:
    """Train like the agent, but neither judge the result on the test split nor adopt it.

    The result is not scaled down to protect general knowledge. For example:

        result = personalise(package, engine, prepared, TrainOptions(steps=500), folder=Path("run"))

    Args:
        package: the package to train.
        engine: engine that is opened on the package.
        prepared: rows of the text.
        options: options of the run.
        folder: folder of the run's files. After a kill, the same call resumes the run.
        start_K: values of the masked weights at the start. None uses the package's own values.

    Raises:
        InputError: there is too little text to select a state.
        RunFailed: the first loss is not finite, or all trained weights are 0.
    """
    # A short text has stages in place of a select split.
    if prepared.stages:
        raise InputError(
            f"There is too little text: at least {NEEDED_TOKENS} tokens are needed to train, select and "
            "judge. Add text."
        )
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(
        folder=RunFolder(folder),
        clock=RunClock(RunFolder(folder)),
        package=package,
        engine=engine,
        w_base_K=package.values() if start_K is None else start_K,
        prepared=prepared,
        options=options,
        reference=Reference.of(package),
    )
    selected = train(run, make_plan(run))
    curve = run.folder.evaluations(selected.descent)
    return Personalised(
        values_K=values(run.w_base_K, selected.s_K, selected.header.step_unit_exponent),
        step=selected.step,
        steps=selected.steps,
        learning_rate=selected.header.learning_rate,
        epsilon=selected.header.epsilon,
        curve=tuple(curve),
    )
