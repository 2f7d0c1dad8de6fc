"""The installed workers with the real tasks, on PostgreSQL and Redis."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from permille.choices import MaskMethod
from permille.corpora.sequences import token_sequences
from permille.corpora.sources import ReadReport, file_texts
from permille.models.loading import FileTokenizer, load_model
from permille.package.blobs import BlobFolder
from permille.package.layers import write_mask
from permille.schemas.inputs import FileCorpus, FolderModel
from permille.schemas.masks import FisherMaskCreate
from permille.sensitivity.fisher import fisher_scores
from permille.sensitivity.masks import select_mask
from permille.store import inputs
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from permille.store.tables import Job
from permille_workers.runtime.work_folders import shared_store
from tests.integration.job_site import Site, job_site, redis_server, wait_until
from tests.packages import sentences
from tests.unit.store.postgres import postgres_server
from tests.unit.workers.conftest import save_model

SEQUENCES, LENGTH = 17, 16


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with (
        postgres_server() as postgres,
        redis_server(tmp_path) as redis,
        job_site(tmp_path, broker_url=redis.url, database_url=postgres.url) as place,
    ):
        yield place


def submit_mask(site: Site) -> Job:
    (site.root / "corpora").mkdir()
    (site.root / "models").mkdir()
    save_model(site.root / "models" / "tiny")
    (site.root / "corpora" / "text.txt").write_text("\n\n".join(sentences(200)))
    source, texts = FolderModel(kind="folder", path="tiny"), FileCorpus(kind="file", path="text.txt")
    with site.db.write() as session:
        model = inputs.add_model(session, tenant_id=site.tenant_id, name="tiny", source=source)
        corpus = inputs.add_corpus(session, tenant_id=site.tenant_id, name="text", source=texts)
        request = FisherMaskCreate(
            method=MaskMethod.FISHER,
            model_id=model.id,
            corpus_id=corpus.id,
            density=0.01,
            sequences=SEQUENCES,
            length=LENGTH,
        )
        payload = request.model_dump(mode="json")
        return queue.submit(session, NewJob(tenant_id=site.tenant_id, kind="mask", payload=payload))


def shards_of(site: Site) -> list[Job]:
    with site.db.read() as session:
        return list(session.scalars(select(Job).where(Job.kind == "shard").order_by(Job.id)))


@pytest.mark.slow
def test_three_workers_make_what_one_process_makes_though_one_is_killed_in_a_shard(site: Site) -> None:
    site.settings.update(FISHER_SPLIT_FLOPS="0", LEASE_S="5", THREADS="1")
    mask = submit_mask(site)
    workers = {worker.pid: worker for worker in (site.start_worker(real=True) for _ in range(3))}
    wait_until(lambda: any(part.worker for part in shards_of(site)), site.explain)
    held = next(part for part in shards_of(site) if part.worker)
    victim = workers.pop(int(str(held.worker).rpartition("-")[2]))
    victim.send_signal(signal.SIGKILL)
    site.wait_for_state(mask, "succeeded")
    shards = shards_of(site)
    assert [(part.payload["first"], part.payload["stop"]) for part in shards] == [(0, 16), (16, 17)]
    assert {part.id: part.fence for part in shards}[held.id] >= 2
    blobs, [made] = BlobFolder(site.root / "blobs"), site.results()
    folder = site.root / "models" / "tiny"
    texts = file_texts(site.root / "corpora" / "text.txt", ReadReport())
    tokens_NT = token_sequences(FileTokenizer(folder), texts, SEQUENCES, LENGTH, 0)
    scores = fisher_scores(load_model(folder), tokens_NT)
    expected = select_mask(scores, MaskMethod.FISHER, 0.01)
    assert made.digest == write_mask(blobs, expected, list(scores)).digest

    wait_until(lambda: not shared_store(blobs).names(), site.explain)
    for worker in workers.values():
        worker.terminate()
        assert worker.wait(60) == 0
