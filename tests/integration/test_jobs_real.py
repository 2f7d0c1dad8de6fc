"""The workers as they are installed, with the real tasks: a build of a tiny model, to its package."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.package.blobs import BlobFolder
from permille.package.reader import verify_package
from permille.schemas.inputs import FileCorpus, FolderModel
from permille.schemas.masks import FisherMask, MaskMethod
from permille.schemas.packages import BuildCreate
from permille.store import inputs
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from tests.integration.job_site import Site, job_site
from tests.packages import sentences
from tests.unit.workers.conftest import save_model


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with job_site(tmp_path) as place:
        yield place


def test_the_worker_process_makes_a_package(site: Site) -> None:
    (site.root / "corpora").mkdir()
    (site.root / "models").mkdir()
    save_model(site.root / "models" / "tiny")
    (site.root / "corpora" / "text.txt").write_text("\n\n".join(sentences(200)))
    with site.db.write() as session:
        model = inputs.add_model(
            session,
            tenant_id=site.tenant_id,
            name="tiny",
            source=FolderModel(kind="folder", path="tiny"),
        )
        corpus = inputs.add_corpus(
            session,
            tenant_id=site.tenant_id,
            name="text",
            source=FileCorpus(kind="file", path="text.txt"),
        )
        mask = FisherMask(method=MaskMethod.FISHER, corpus_id=corpus.id, density=0.01, sequences=2, length=16)
        request = BuildCreate(model_id=model.id, mask=mask)
        build = queue.submit(
            session,
            NewJob(
                tenant_id=site.tenant_id,
                kind="build",
                payload=request.model_dump(mode="json"),
            ),
        )
    with (site.root / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "permille_workers"], env=site.environment(), stdout=log, stderr=log
        )
    site.processes.append(worker)
    after = site.wait_for_state(build, "succeeded")
    [package] = [row for row in site.results() if row.kind == "package"]
    assert package.digest == after.result_id
    assert verify_package(BlobFolder(site.root / "blobs"), package.digest).k == package.k
    worker.terminate()
    assert worker.wait(60) == 0
