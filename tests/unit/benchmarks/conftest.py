"""The evidence's materials in their smallest form, and a folder in which everything has run once."""

from pathlib import Path

import pytest

from benchmarks.evidence import main
from tests.evidence_files import arguments
from tests.tiny_model import write_corpus, write_model, write_sst2


@pytest.fixture(scope="session")
def materials_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    write_model(folder / "tiny")
    write_corpus(folder / "corpus.jsonl", rows=40)
    write_sst2(folder / "train.tsv")
    path = folder / "materials.toml"
    path.write_text('models = ["tiny"]\ncorpus = "corpus.jsonl"\n[tasks.sst2]\ntrain = "train.tsv"\n')
    return path


@pytest.fixture(scope="session")
def evidence(materials_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything has run once."""
    folder = tmp_path_factory.mktemp("evidence")
    assert main(arguments(materials_file, folder)) == 0
    return folder
