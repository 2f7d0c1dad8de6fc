"""Fixture of a small sweep on the example model."""

import json
from pathlib import Path

import pytest

from tests.sweep_files import EXAMPLE_MODEL, WORDS


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    rows = [f"a {word} film number {n}\t{int(word in WORDS[:4])}\n" for n in range(6) for word in WORDS]
    (tmp_path / "train.tsv").write_text("".join(rows) + "no label\n")
    corpus = [json.dumps({"text": f"The {word} garden is open. " * 40}) + "\n" for word in WORDS]
    (tmp_path / "corpus.jsonl").write_text("".join(corpus))
    path = tmp_path / "sweep.toml"
    path.write_text(
        f"""
models = ["{EXAMPLE_MODEL}"]
corpus = "corpus.jsonl"
methods = ["zero-shot", "icl:1", "zo:sensitive-c4", "zo:random-dynamic", "zo:lora-4", "fo:sensitive-c4"]
bases = ["nf4"]
seeds = [0]
zo_steps = 4
fo_steps = 2
queries = 2
estimator = "forward"
batch_size = 2
trials = 1
evaluations = 2
refresh_steps = 2
sizes = [8, 4, 6]
max_tokens = 48
corpus_sequences = 2
corpus_tokens = 32
[tasks.sst2]
train = "train.tsv"
"""
    )
    return path
