"""The workers as they are installed, with the real tasks: a build of a tiny model, to its package."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.package.reader import verify_package
from permille.store import corpora, jobs, models, results
from permille.store.blobs import FolderBlobStore
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
        model = models.register(
            session, tenant_id=site.tenant_id, name="tiny", kind="folder", location="tiny"
        )
        corpus = corpora.register(
            session, tenant_id=site.tenant_id, name="text", kind="file", location="text.txt"
        )
        build = jobs.submit(
            session,
            tenant_id=site.tenant_id,
            kind="build",
            payload={
                "model_id": model.id,
                "corpus_id": corpus.id,
                "mask": {"method": "fisher", "density": 0.01, "sequences": 2, "length": 16, "seed": 1},
                "quantization": {"scheme": "nf4", "group_size": 64},
            },
        )
    with (site.root / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "permille_workers"], env=site.environment(), stdout=log, stderr=log
        )
    site.processes.append(worker)
    after = site.wait_for_state(build, "succeeded")
    with site.db.read() as session:
        package = results.get_package_by_id(
            session, tenant_id=site.tenant_id, package_id=str(after.result_id)
        )
    assert verify_package(FolderBlobStore(site.root / "blobs"), package.digest).k == package.k
    worker.terminate()
    assert worker.wait(60) == 0
