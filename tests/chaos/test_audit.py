"""The audit of `make chaos` finds planted errors, and no others."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from permille.package.blobs import BlobFolder
from permille.schemas.jobs import JobKind
from permille.store import access
from permille.store.artifacts import Blob, TaskResult
from permille.store.database import Database
from permille.store.jobs import claims, queue
from permille.store.jobs.transitions import NewJob
from permille.store.migrations.schema import migrate
from permille.store.tables import Artifact
from tests.artifacts import add_artifact, some_model
from tests.chaos.audit import Findings, audit

BYTES = b"what a mask is"


@dataclass(frozen=True, slots=True)
class Site:
    """A store in which one job has made one mask."""

    root: Path
    db: Database
    tenant_id: str
    mask: Artifact

    def audit(self, **accepted: list[str]) -> Findings:
        return audit(self.db.url, self.root / "blobs", accepted or {"mask": [self.mask.job_id]})

    def execute(self, statement: str, **values: str) -> None:
        with self.db.write() as session:
            session.execute(text(statement), values)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    url = f"sqlite:///{tmp_path}/permille.db"
    migrate(url)
    db = Database(url)
    with db.write() as session:
        tenant_id = access.create_tenant(session, name="acme").id
        yield_mask = _add_mask(session, tenant_id, BlobFolder(tmp_path / "blobs"))
    yield Site(tmp_path, db, tenant_id, yield_mask)
    db.close()


def _add_mask(session: Session, tenant_id: str, blobs: BlobFolder) -> Artifact:
    digest = blobs.put_bytes(BYTES)
    blob = Blob(role="mask", media_type="m", digest=digest, size_bytes=len(BYTES))
    model_id = some_model(session, tenant_id)
    made = TaskResult(model_id=model_id, digest=digest, k=1, provenance={}, blobs=(blob,))
    request = {"model_id": model_id, "method": "random", "density": 0.01}
    return add_artifact(session, tenant_id=tenant_id, kind=JobKind.MASK, request=request, made=made)


def test_a_store_where_all_is_well_is_clean(site: Site) -> None:
    found = site.audit()
    assert found.clean
    assert found.line(1) == "chaos: jobs=1 lost=0 published_twice=0 orphan_blobs=0"


def test_it_finds_jobs_that_were_lost(site: Site) -> None:
    def submitted() -> str:
        with site.db.write() as session:
            return queue.submit(session, NewJob(tenant_id=site.tenant_id, kind="mask", payload={})).id

    waiting, dead, failed, wrong = (submitted() for _ in range(4))
    ended = "UPDATE jobs SET state = :state, error = :error WHERE id = :id"
    site.execute(ended, state="dead", error=json.dumps({"type": "WorkerLost"}), id=dead)
    site.execute(ended, state="failed", error=json.dumps({"type": "OSError"}), id=failed)
    site.execute(ended, state="failed", error=json.dumps({"type": "InputError"}), id=wrong)
    found = site.audit(a=[waiting], b=[dead], c=[failed], d=["job_of_no_row"], e=[wrong])
    assert [line.split(":")[0] for line in found.lost] == [
        "d",
        *sorted(
            f"mask {job} is {state}"
            for job, state in ((waiting, "queued"), (dead, "dead"), (failed, "failed"))
        ),
    ]
    assert not found.published_twice + found.orphan_blobs


def test_it_finds_a_result_that_is_gone(site: Site) -> None:
    for table in ("artifact_blobs", "artifact_sources"):
        site.execute(f"DELETE FROM {table}")
    site.execute("DELETE FROM artifacts")
    found = site.audit()
    assert [line.split(",")[0] for line in found.lost] == [f"mask {site.mask.job_id} has succeeded"]
    assert len(found.orphan_blobs) == 1


def test_it_finds_what_was_published_twice(site: Site) -> None:
    with site.db.write() as session:
        second = Artifact(
            **{
                name: getattr(site.mask, name)
                for name in ("tenant_id", "kind", "job_id", "model_id", "request")
            },
            id="mask_second",
            digest=site.mask.digest,
            size_bytes=1,
            provenance={},
            created_at=site.mask.created_at,
        )
        session.add(second)
    with site.db.write() as session:
        job = queue.lock(session, tenant_id=site.tenant_id, job_id=site.mask.job_id)
        job.state, job.event_seq = "running", job.event_seq + 1
        held = claims.Claim(
            **{name: getattr(job, name) for name in ("tenant_id", "kind", "payload", "fence", "attempt")},
            job_id=job.id,
            max_attempts=3,
        )
        claims.complete(session, held, result_id="mask_second")
    found = site.audit(a=[site.mask.job_id, "another"], b=[site.mask.job_id])
    assert [line.split(" ", 1)[1] for line in found.published_twice if line.startswith("job")] == [
        "has 2 artifacts",
        "has succeeded 2 times",
    ]
    assert [line for line in found.published_twice if line.startswith("a was answered")]


def test_it_finds_blobs_without_rows_and_rows_without_their_bytes(site: Site) -> None:
    blobs = BlobFolder(site.root / "blobs")
    orphan = blobs.put_bytes(b"nobody's")
    blobs.below("parts", "job_x").put_bytes(b"left")
    blobs.below("uploads", site.tenant_id, "upload_x").put_bytes(b"forgotten")
    path = blobs.path(site.mask.digest)
    path.chmod(0o600)
    path.write_bytes(BYTES[:-1])
    found = site.audit()
    assert len(found.orphan_blobs) == 4
    assert f"blob {orphan} is of no artifact" in found.orphan_blobs
    assert f"{site.mask.digest} has a row and other bytes" in found.orphan_blobs
    path.unlink()
    assert f"{site.mask.digest} has a row and no bytes" in site.audit().orphan_blobs
    assert not found.lost + found.published_twice
