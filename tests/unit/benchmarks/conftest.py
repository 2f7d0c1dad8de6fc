"""The evidence's materials in their smallest form, and a folder in which everything has run once.

Both are made once for all processes of a test run: everything takes a minute.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from permille_lab.benchmarks.evidence import main
from tests.evidence_files import arguments
from tests.tiny_model import write_corpus, write_model, write_sst2


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first process that wants it makes; nobody may change what is in it."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all processes of this run
    folder = root / f"shared-{name}"
    with FileLock(root / f"shared-{name}.lock"):
        if not folder.exists():
            partial = root / f"shared-{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # of one that failed
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def materials_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        write_model(folder / "tiny")
        write_corpus(folder / "corpus.jsonl", rows=40)
        write_sst2(folder / "train.tsv")
        named = 'models = ["tiny"]\ncorpus = "corpus.jsonl"\n[tasks.sst2]\ntrain = "train.tsv"\n'
        (folder / "materials.toml").write_text(named)

    return made_once(tmp_path_factory, "materials", make) / "materials.toml"


@pytest.fixture(scope="session")
def evidence(materials_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything has run once; of this process, which may run more in it."""

    def make(folder: Path) -> None:
        assert main(arguments(materials_file, folder)) == 0

    folder = tmp_path_factory.mktemp("evidence") / "evidence"
    shutil.copytree(made_once(tmp_path_factory, "evidence", make), folder)
    return folder
