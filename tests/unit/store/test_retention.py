"""Tests of retention rules: which objects they delete, and which they never delete."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from permille.choices import StreamedDataset
from permille.errors import OperatorError
from permille.package.blobs import BlobFolder
from permille.schemas.access import RetentionRule
from permille.schemas.inputs import StreamedCorpus
from permille.schemas.jobs import JobKind
from permille.schemas.packages import BuildCreate
from permille.schemas.runs import LogForm, LogState
from permille.store import artifacts, audit, devices, inputs, releases, runs, uploads
from permille.store.artifacts import Blob, TaskResult
from permille.store.database import Database
from permille.store.errors import ConflictError, NotFoundError
from permille.store.jobs import claims, queue
from permille.store.jobs.transitions import NewJob
from permille.store.retention import rules
from permille.store.tables import Artifact, Corpus, Job, Run, Upload
from tests.artifacts import QUOTA, add_artifact, some_model
from tests.unit.store.conftest import Clock
from tests.unit.store.test_logs_at_once import begun

DAY_S = 86_400.0
TOKEN = "operator_01jd3kq8z7m4n5p6r7s8t9v0wx"


class Keeping:
    """A tenant with a rule and its objects."""

    def __init__(self, db: Database, tenant_id: str, clock: Clock) -> None:
        self.db, self.tenant_id, self._clock, self._made = db, tenant_id, clock, 0

    def make(self, kind: JobKind, **request: Any) -> Artifact:
        """Add an artifact, one day after the last one."""
        self._made += 1
        self._clock.forward(DAY_S)
        digest = f"sha256:{self._made:064d}"
        with self.db.write() as session:
            made = TaskResult(
                model_id=some_model(session, self.tenant_id),
                digest=digest,
                provenance={},
                blobs=(Blob(role="mask", media_type="x", digest=digest, size_bytes=1),),
                k=1,
            )
            return add_artifact(session, tenant_id=self.tenant_id, kind=kind, request=request, made=made)

    def device(self) -> dict[str, Any]:
        """Enrol a device. Return its tenant id and device id, for reports of runs."""
        with self.db.write() as session:
            _, code = devices.invite(session, tenant_id=self.tenant_id, release="tiny", alias="stable")
            device = devices.enrol(session, code=code, public_key="k", name="n", agent_version="0.1.0").device
        return {"tenant_id": self.tenant_id, "device_id": device.id}

    def rule(self, **fields: int) -> None:
        """Set the rule."""
        with self.db.write() as session:
            rules.set_rule(
                session, tenant_id=self.tenant_id, token_id=TOKEN, rule=RetentionRule.model_validate(fields)
            )

    def apply(self, *, dry_run: bool = False) -> rules.Gone:
        """Apply the rule."""
        return rules.apply(self.db, tenant_id=self.tenant_id, token_id=TOKEN, dry_run=dry_run)

    def left(self, kind: JobKind) -> list[str]:
        """Return the ids of the artifacts of this kind that are left, oldest first."""
        with self.db.read() as session:
            query = select(Artifact.id).where(Artifact.kind == kind.value).order_by(Artifact.created_at)
            return list(session.scalars(query))


@pytest.fixture
def keeping(db: Database, tenant_id: str, clock: Clock) -> Keeping:
    return Keeping(db, tenant_id, clock)


def test_old_results_go_but_for_the_newest_and_what_they_are_made_of(keeping: Keeping, clock: Clock) -> None:
    masks = [keeping.make(JobKind.MASK) for _ in range(3)]
    packages = [keeping.make(JobKind.PACKAGE, mask_id=mask.id) for mask in masks]
    keeping.rule(result_days=10, keep_newest=1)
    assert not keeping.apply(), "they are young"
    clock.forward(30 * DAY_S)
    wanted: dict[str, Any] = {
        "packages": [row.digest for row in packages[:2]],
        "masks": [row.id for row in masks[:2]],
    }
    assert keeping.apply(dry_run=True) == rules.Gone(**wanted)
    assert len(keeping.left(JobKind.PACKAGE)) == 3
    assert keeping.apply() == rules.Gone(**wanted)
    assert (keeping.left(JobKind.PACKAGE), keeping.left(JobKind.MASK)) == ([packages[2].id], [masks[2].id])
    assert not keeping.apply()
    with keeping.db.read() as session:
        entries = audit.entries_after(session, tenant_id=keeping.tenant_id, seq=0, limit=9)
    noted = [(one.token_id, one.action, one.request) for one in entries]
    empty = {"quantizations": [], "logs": 0, "reports": 0, "jobs": 0}
    assert noted == [(TOKEN, "apply_retention", {**empty, **wanted})]


def test_what_is_published_yanked_or_needed_by_unfinished_work_stays(keeping: Keeping, clock: Clock) -> None:
    published, yanked, exported, loose = (keeping.make(JobKind.PACKAGE) for _ in range(4))
    payload: dict[str, object] = {"package_digest": exported.digest, "weights": "float32"}
    with keeping.db.write() as session:
        for package in (published, yanked):
            releases.publish(session, name="tiny", package=package)
        releases.yank(session, tenant_id=keeping.tenant_id, name="tiny", version=2, reason="bad")
        job = queue.submit(session, NewJob(tenant_id=keeping.tenant_id, kind=JobKind.EXPORT, payload=payload))
    keeping.rule(result_days=1, keep_newest=0)
    clock.forward(400 * DAY_S)
    assert keeping.apply().packages == [loose.digest]
    with keeping.db.write() as session:
        queue.request_cancel(session, tenant_id=keeping.tenant_id, job_id=job.id)
    assert keeping.apply().packages == [exported.digest]
    assert keeping.left(JobKind.PACKAGE) == [published.id, yanked.id]


def test_a_part_of_a_build_that_goes_on_stays(keeping: Keeping, clock: Clock) -> None:
    keeping.rule(result_days=1, keep_newest=0)
    with keeping.db.write() as session:
        model_id = some_model(session, keeping.tenant_id)
        asked = {"model_id": model_id, "mask": {"method": "random"}, "quantization": {"scheme": "nf4"}}
        build = queue.submit(session, NewJob(tenant_id=keeping.tenant_id, kind=JobKind.BUILD, payload=asked))
    with keeping.db.write() as session:
        mask = next(one for one in queue.parts_of(session, build) if one.kind == JobKind.MASK)
        claim = claims.claim(session, worker="w", lease_s=60, job_id=mask.id)
        assert claim is not None
        made = artifacts.add(
            session, job=claim, made=TaskResult(model_id=model_id, digest="sha256:x", provenance={}, blobs=())
        )
        claims.complete(session, claim, result_id=made.id)
    clock.forward(9 * DAY_S)
    assert not keeping.apply(), "its quantization is still to be made, then the package of both"
    with keeping.db.write() as session:
        queue.request_cancel(session, tenant_id=keeping.tenant_id, job_id=build.id)
    assert keeping.apply().masks == [made.id]


def test_the_record_of_a_job_of_an_unknown_kind_goes_with_the_others(keeping: Keeping, clock: Clock) -> None:
    with keeping.db.write() as session:
        for _ in range(2):
            job = queue.submit(session, NewJob(tenant_id=keeping.tenant_id, kind=JobKind.MASK, payload={}))
            queue.request_cancel(session, tenant_id=keeping.tenant_id, job_id=job.id)
        job.kind = "of an extension that was removed"
    keeping.rule(job_days=5)
    clock.forward(6 * DAY_S)
    assert keeping.apply() == rules.Gone(jobs=2)


def test_an_upload_that_cannot_be_erased_stops_no_other(
    keeping: Keeping, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_device, blobs = keeping.device(), BlobFolder(tmp_path)
    with keeping.db.write() as session:
        made = [uploads.begin(session, **of_device, run_id=f"run-{n}", quota=QUOTA).id for n in range(2)]
    for upload_id in made:
        uploads.open_folder(blobs, tenant_id=keeping.tenant_id, upload_id=upload_id).put_bytes(b"log")
    erase = BlobFolder.erase

    def refuse(folder: BlobFolder) -> None:
        if folder.root.name == min(made):
            raise OperatorError("the bucket refuses us")
        erase(folder)

    monkeypatch.setattr(BlobFolder, "erase", refuse)
    clock.forward(DAY_S / 2)
    assert uploads.sweep(keeping.db, blobs) == 1
    monkeypatch.undo()
    assert uploads.sweep(keeping.db, blobs) == 1


def test_logs_then_reports_then_jobs_go(keeping: Keeping, clock: Clock) -> None:
    tenant_id, of_device = keeping.tenant_id, keeping.device()
    with keeping.db.write() as session:
        for run_id in ("first", "second"):
            runs.report(session, **of_device, run_id=run_id, metrics={"release": "tiny", "version": 1})
        upload = uploads.begin(session, **of_device, run_id="first", quota=QUOTA)
        log = runs.SentLog(form=LogForm.LOG, digest="sha256:x", size_bytes=3, upload_id=upload.id)
        runs.attach_log(session, **of_device, run_id="first", log=log)
        claim = claims.claim(session, worker="w", lease_s=60)
        assert claim is not None
        verdict = runs.LogVerdict(state=LogState.VERIFIED)
        runs.finish_log(session, tenant_id=tenant_id, run_id="first", log_digest="sha256:x", verdict=verdict)
        claims.complete(session, claim, result_id="first")
    keeping.rule(log_days=10, report_days=20, job_days=5)
    clock.forward(6 * DAY_S)
    assert not keeping.apply(), "the log's check is named by its run"
    clock.forward(6 * DAY_S)
    assert keeping.apply() == rules.Gone(logs=1, jobs=1)
    with keeping.db.read() as session:
        assert session.get_one(Upload, upload.id).state == "doomed"
        assert session.scalars(select(Job)).all() == []
        assert session.get_one(Run, (tenant_id, "second")).newest
    clock.forward(9 * DAY_S)
    assert keeping.apply() == rules.Gone(reports=2)
    with keeping.db.read() as session:
        assert session.scalars(select(Run)).all() == []


@pytest.mark.parametrize("removed_first", [False, True])
def test_a_mask_that_a_build_takes_and_that_is_removed_at_once_stays_or_is_made_again(
    keeping: Keeping, removed_first: bool
) -> None:
    tenant_id = keeping.tenant_id
    with keeping.db.write() as session:
        model_id = some_model(session, tenant_id)
    asked = BuildCreate.model_validate(
        {"model_id": model_id, "mask": {"method": "random"}, "quantization": {"scheme": "nf4"}}
    )
    request = asked.mask_request()
    assert request is not None
    mask = keeping.make(JobKind.MASK, **request.model_dump(mode="json"))

    def find(session: Session, part: Job) -> Job | None:
        found = queue.find_equal(session, tenant_id=tenant_id, request_digest=part.request_digest)
        return found if found is not None and artifacts.has_result(session, found) else None

    def build(session: Session) -> dict[str, str]:
        new = NewJob(tenant_id=tenant_id, kind=JobKind.BUILD, payload=asked.model_dump(mode="json"))
        return {part.kind: part.state for part in queue.parts_of(session, queue.submit(session, new, find))}

    def remove(session: Session) -> None:
        artifacts.remove(session, tenant_id=tenant_id, kind=JobKind.MASK, key=mask.id)

    works: list[Callable[[Session], object]] = [remove, build] if removed_first else [build, remove]
    with ThreadPoolExecutor(1) as pool:
        with keeping.db.write() as session:
            works[0](session)
            other = begun(keeping.db, pool, works[1])
        if removed_first:
            assert other.result(60) == {"mask": "queued", "quantization": "queued"}
        else:
            with pytest.raises(ConflictError, match="job_"):
                other.result(60)
    assert keeping.left(JobKind.MASK) == ([] if removed_first else [mask.id])


def test_what_two_remove_at_once_is_there_for_one_of_them(keeping: Keeping) -> None:
    tenant_id = keeping.tenant_id
    mask = keeping.make(JobKind.MASK)
    with keeping.db.write() as session:
        source = StreamedCorpus(kind="streamed", dataset=StreamedDataset.C4)
        corpus = inputs.add_corpus(session, tenant_id=tenant_id, name="c", source=source)
    removals: tuple[Callable[[Session], None], ...] = (
        lambda session: inputs.remove(session, Corpus, tenant_id=tenant_id, row_id=corpus.id),
        lambda session: artifacts.remove(session, tenant_id=tenant_id, kind=JobKind.MASK, key=mask.id),
    )
    for remove in removals:
        with ThreadPoolExecutor(1) as pool:
            with keeping.db.write() as session:
                remove(session)
                other = begun(keeping.db, pool, remove)
            with pytest.raises(NotFoundError):
                other.result(60)


def test_workers_apply_the_rules_of_all_tenants_in_turns_of_a_few(
    keeping: Keeping, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MOST", 2)
    kept = [keeping.make(JobKind.QUANTIZATION) for _ in range(5)]
    of_device = keeping.device()
    with keeping.db.write() as session:
        for number in range(7):
            metrics: dict[str, object] = {"release": "tiny", "version": 1}
            runs.report(session, **of_device, run_id=f"run {number}", metrics=metrics)
    rules.apply_all(keeping.db)
    keeping.rule(result_days=1, keep_newest=0, job_days=1, report_days=1)
    clock.forward(9 * DAY_S)
    rules.apply_all(keeping.db)
    assert keeping.left(JobKind.QUANTIZATION) == [] != kept
    with keeping.db.read() as session:
        assert session.scalars(select(Job)).all() == [] == session.scalars(select(Run)).all()
        assert len(audit.entries_after(session, tenant_id=keeping.tenant_id, seq=0, limit=9)) == 4


@pytest.mark.parametrize("removed_first", [False, True])
def test_a_package_that_is_published_and_removed_at_once_is_whole_or_gone(
    keeping: Keeping, removed_first: bool
) -> None:
    package = keeping.make(JobKind.PACKAGE)

    def publish(session: Session) -> None:
        releases.publish(session, name="tiny", package=package)

    def remove(session: Session) -> None:
        artifacts.remove(session, tenant_id=keeping.tenant_id, kind=JobKind.PACKAGE, key=package.digest)

    first, second = (remove, publish) if removed_first else (publish, remove)
    refusal = IntegrityError if removed_first else ConflictError
    with ThreadPoolExecutor(1) as pool:
        with keeping.db.write() as session:
            first(session)
            other = begun(keeping.db, pool, second)
        with pytest.raises(refusal):
            other.result(60)
    assert keeping.left(JobKind.PACKAGE) == ([] if removed_first else [package.id])
