"""The evaluation job on a tiny random model: found, resumed, refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from permille.evaluate import sweep as sweeps
from permille.evaluate.cells import Bench as SweepBench
from permille.store import claims, corpora, evaluations
from permille.store.tables import Evaluation
from tests.unit.workers.conftest import Bench, save_model
from tests.unit.workers.test_tasks import failed, succeeded
from workers.child import attempt
from workers.tasks import TASKS

SMALL = {
    "methods": ["zero-shot", "zo:random", "fo:sensitive-c4"],
    "bases": ["nf4"],
    "seeds": [0],
    "density": 0.01,
    "zo_steps": 2,
    "fo_steps": 1,
    "queries": 1,
    "batch_size": 2,
    "trials": 1,
    "evaluations": 1,
    "sizes": [8, 4, 6],
    "max_tokens": 32,
    "corpus_sequences": 2,
    "corpus_tokens": 16,
}


def write_task(folder: Path) -> None:
    """SST-2 rows, one of them broken."""
    (folder / "sst2").mkdir(exist_ok=True)
    rows = [f"the {word} cat number {n}\t{n % 2}\n" for n in range(12) for word in ("old", "small")]
    (folder / "sst2" / "train.tsv").write_text("".join(rows) + "no label\n")


def payload_of(bench: Bench, **changes: Any) -> dict[str, Any]:
    write_task(bench.root / "corpora")
    return {
        "model_ids": [bench.model.id],
        "corpus_id": bench.corpus.id,
        "tasks": {"sst2": {"train": "sst2/train.tsv", "test": None}},
        **SMALL,
        **changes,
    }


def evaluation_of(bench: Bench, **changes: Any) -> Evaluation:
    job = succeeded(bench.finish("evaluation", payload_of(bench, **changes)))
    assert job.result_kind == "evaluation"
    with bench.db.read() as session:
        return evaluations.get(session, tenant_id=bench.tenant_id, evaluation_id=str(job.result_id))


def lines_of(bench: Bench, evaluation: Evaluation) -> list[dict[str, Any]]:
    content = bench.blobs.read(evaluation.results_digest, limit=1 << 24)
    assert len(content) == evaluation.size_bytes
    return [json.loads(line) for line in content.splitlines()]


def test_an_evaluation_keeps_results_tables_and_where_they_come_from(bench: Bench) -> None:
    evaluation = evaluation_of(bench)
    lines = lines_of(bench, evaluation)
    cells = [line for line in lines if line["kind"] == "cell"]
    assert [cell["method"] for cell in cells] == SMALL["methods"]
    assert {cell["model"] for cell in cells} == {"tiny"}
    assert (evaluation.cells, evaluation.bad_rows) == (3, 1)
    table = bench.blobs.read(evaluation.report_digest, limit=1 << 20).decode()
    assert table.startswith("## tiny, nf4") and "| zo:random |" in table
    assert evaluation.provenance["models"][0]["digest"].startswith("sha256:")
    assert set(evaluation.provenance["tasks"]) == {"sst2.train"}
    assert evaluation.options["tasks"] == {"sst2": {"train": "sst2/train.tsv"}}
    with bench.db.read() as session:
        assert evaluations.model_ids_of(session, evaluation=evaluation) == [bench.model.id]
