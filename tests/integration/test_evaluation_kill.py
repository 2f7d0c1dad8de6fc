"""A worker that is killed in the middle of an evaluation: the next one goes on, with the real processes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from permille.store import corpora, evaluations, jobs, models
from permille.store.blobs import FolderBlobStore
from permille.store.tables import Job
from tests.integration.job_site import Site, job_site, wait_until
from tests.tiny_model import write_corpus, write_model, write_sst2

METHODS = ["zero-shot", "icl:1", "zo:random"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with job_site(tmp_path) as place:
        place.settings["LEASE_S"] = "2"
        yield place


def submitted(site: Site) -> Job:
    """An evaluation whose last cell takes much longer than the others."""
    write_model(site.root / "models" / "tiny")
    write_corpus(site.root / "corpora" / "texts.jsonl")
    write_sst2(site.root / "corpora" / "sst2.tsv")
    with site.db.write() as session:
        model = models.register(
            session, tenant_id=site.tenant_id, name="tiny", kind="folder", location="tiny"
        )
        corpus = corpora.register(
            session, tenant_id=site.tenant_id, name="texts", kind="file", location="texts.jsonl"
        )
        payload = {
            "model_ids": [model.id],
            "corpus_id": corpus.id,
            "tasks": {"sst2": {"train": "sst2.tsv"}},
            "methods": METHODS,
            "seeds": [0],
            "density": 0.01,
            "zo_steps": 80,
            "queries": 1,
            "batch_size": 2,
            "trials": 1,
            "evaluations": 1,
            "sizes": [8, 4, 6],
            "max_tokens": 32,
        }
        return jobs.submit(session, tenant_id=site.tenant_id, kind="evaluation", payload=payload)


def start(site: Site) -> "subprocess.Popen[bytes]":
    with (site.root / "worker.log").open("ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "permille_workers"], env=site.environment(), stdout=log, stderr=log
        )
    site.processes.append(worker)
    return worker


def finished_cells(site: Site, job: Job) -> list[bytes]:
    """Lines of cells that are durable."""
    files = list((site.root / "work" / "jobs" / job.id).glob("results-*.jsonl"))
    lines = files[0].read_bytes().splitlines(keepends=True) if files else []
    return [line for line in lines if b'"kind":"cell"' in line and line.endswith(b"\n")]


def test_no_finished_cell_is_computed_again_after_a_kill(site: Site) -> None:
    job = submitted(site)
    worker = start(site)
    wait_until(lambda: len(finished_cells(site, job)) == 2, site.explain)
    worker.kill()
    worker.wait()
    before = finished_cells(site, job)
    start(site)
    after = site.wait_for_state(job, "succeeded")
    assert (after.attempt, len(before)) == (2, 2)
    with site.db.read() as session:
        row = evaluations.get(session, tenant_id=site.tenant_id, evaluation_id=str(after.result_id))
    content = FolderBlobStore(site.root / "blobs").read(row.results_digest, limit=1 << 24)
    cells = [line for line in content.splitlines(keepends=True) if b'"kind":"cell"' in line]
    assert cells[:2] == before  # to the last bit of the seconds they took
    found: list[dict[str, Any]] = [json.loads(line) for line in cells]
    assert [cell["method"] for cell in found] == METHODS
