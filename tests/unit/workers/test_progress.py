"""Tests of progress: throttled, and with an estimate. Also of pipes, work folders and lean processes."""

import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from permille.digests import digest_of
from permille.errors import InputError, OperatorError, PackageError, RetryableError
from permille.package.blobs import BlobFolder
from permille.schemas.fields import EXAMPLE_ULID
from permille.schemas.jobs import JobKind
from permille.schemas.masks import ShardRequest
from permille.store import access, rows
from permille.store.artifacts import Blob, TaskResult
from permille.store.database import Database
from permille.store.errors import BlobStoreError, NotFoundError, StaleClaimError
from permille.store.jobs import claims, queue
from permille.store.jobs.claims import Claim
from permille.store.jobs.transitions import NewJob
from permille.store.migrations.schema import migrate
from permille.store.settings import layout
from permille.store.tables import BlobCollection, Job
from permille_workers.runtime import child, supervisor
from permille_workers.runtime.child import record_failure
from permille_workers.runtime.context import JobCancelledError, PartsToAdd, Progress
from permille_workers.runtime.handover import decode_handover, encode_handover
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.supervisor import Shutdown, Supervisor
from permille_workers.runtime.sweeper import Sweeper
from permille_workers.runtime.work_folders import locked_work_folder, remove_ended, shared_store
from tests.artifacts import add_artifact, some_model


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path}/permille.db"
    migrate(url)
    database = Database(url)
    yield database
    database.close()


@pytest.fixture
def claim(db: Database) -> Claim:
    with db.write() as session:
        tenant = access.create_tenant(session, name="acme")
        queue.submit(session, NewJob(tenant_id=tenant.id, kind="mask", payload={}))
    with db.write() as session:
        found = claims.claim(session, worker="w", lease_s=600)
    assert found is not None
    return found


class Seconds:
    """A monotonic clock that stands still until a test sets it."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


def read(db: Database, claim: Claim) -> Job:
    with db.read() as session:
        return rows.get(session, Job, tenant_id=claim.tenant_id, row_id=claim.job_id)


def test_progress_is_told_once_a_second_and_at_each_stage(db: Database, claim: Claim) -> None:
    clock = Seconds()
    progress = Progress(db, claim, clock=clock)
    told = []
    for at, message in ((0.0, "fisher 1/9"), (0.5, "fisher 2/9"), (0.6, "selecting"), (5.0, "selecting")):
        clock.at = at
        progress(at / 10, message)
        told.append((read(db, claim).progress, read(db, claim).message))
    assert told == [(0.0, "fisher 1/9"), (0.0, "fisher 1/9"), (0.06, "selecting"), (0.5, "selecting")]


def test_the_estimate_takes_the_pace_of_this_attempt(db: Database, claim: Claim) -> None:
    clock = Seconds()
    progress = Progress(db, claim, clock=clock)
    progress(0.5, "resumed half way")
    clock.at = 10.0
    progress(0.6, "fisher")
    row = read(db, claim)
    assert row.eta_at is not None
    assert (row.eta_at - row.updated_at).total_seconds() == pytest.approx(40, abs=0.01)


def test_a_message_in_between_leaves_the_estimate_as_it_was(db: Database, claim: Claim) -> None:
    """A long search reports each trial, but its fraction changes only with a finished cell."""
    clock = Seconds()
    progress = Progress(db, claim, clock=clock)
    progress(0.5, "resumed half way")
    left = []
    for at, message in ((10.0, "cell"), (20.0, "a trial"), (45.0, "another"), (80.0, "later than thought")):
        clock.at = at
        progress(0.6, message)
        row = read(db, claim)
        assert row.eta_at is not None
        left.append((row.eta_at - row.updated_at).total_seconds())
    assert left == [pytest.approx(seconds, abs=0.01) for seconds in (40, 30, 5, 0)]


def test_progress_stops_a_job_that_is_to_be_cancelled(db: Database, claim: Claim) -> None:
    with db.write() as session:
        queue.request_cancel(session, tenant_id=claim.tenant_id, job_id=claim.job_id)
    with pytest.raises(JobCancelledError):
        Progress(db, claim)(0.5, "working")


def test_progress_stops_a_stale_attempt(db: Database, claim: Claim) -> None:
    with pytest.raises(StaleClaimError):
        Progress(db, replace(claim, fence=0))(0.5, "working")


def settings(tmp_path: Path) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {
            "database_url": "postgresql+psycopg://me:secret@host/name",
            "blob_root": tmp_path / "b",
            "model_root": tmp_path / "m",
            "corpus_root": tmp_path / "c",
            "tenant_root": tmp_path / "t",
            "work_root": tmp_path / "w",
            "threads": 2,
            "lease_s": 7.5,
        }
    )


def test_the_child_gets_claim_and_settings_by_the_pipe(tmp_path: Path, claim: Claim) -> None:
    given = settings(tmp_path)
    line = encode_handover(claim, given)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_handover(line) == (claim, given)
    assert "secret" not in repr(given)


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"{}", b'{"claim": {}, "settings": {}}'])
def test_a_line_that_is_none_of_ours_is_refused(line: bytes) -> None:
    with pytest.raises(InputError, match="a line from a supervisor"):
        decode_handover(line)


@pytest.mark.parametrize("failed", [False, True])
def test_folders_go_with_their_jobs_but_parts_of_a_failed_one_stay_a_day(
    db: Database, claim: Claim, tmp_path: Path, failed: bool
) -> None:
    with locked_work_folder(tmp_path / "work", claim.job_id) as folder:
        (folder / "sums").write_text("x")
    blobs = BlobFolder(tmp_path / "blobs")
    parts = shared_store(blobs).below(claim.job_id)
    made = parts.put_bytes(b"sums")
    (tmp_path / "work" / "jobs" / "job_unknown").mkdir()
    assert remove_ended(db, tmp_path / "work", blobs) == ["job_unknown"]
    assert (folder / "sums").exists()
    with db.write() as session:
        if failed:
            claims.fail(session, claim, error={"type": "T", "message": "m"}, retryable=False)
        else:
            claims.complete(session, claim, result_id="mask_1")
    assert claim.job_id in remove_ended(db, tmp_path / "work", blobs)
    assert (folder.exists(), parts.has(made)) == (False, failed)


@pytest.mark.parametrize("failure", [None, OperatorError("the bucket refuses us")])
def test_folders_of_others_and_failures_stop_no_removal(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    blobs = BlobFolder(tmp_path / "blobs")
    for name in (".snapshot", "jobs of mine", "job_1", "job_2"):
        (shared_store(blobs).root / name).mkdir(parents=True)
    erase = BlobFolder.erase

    def erase_or_fail(store: BlobFolder) -> None:
        if failure is not None and store.root.name == "job_1":
            raise failure
        erase(store)

    monkeypatch.setattr(BlobFolder, "erase", erase_or_fail)
    assert remove_ended(db, tmp_path / "work", blobs) == ["job_1", "job_2"]
    left = {".snapshot", "jobs of mine", *(["job_1"] if failure else [])}
    assert set(shared_store(blobs).names()) == left


def test_workers_collect_in_turns_but_not_beside_a_database_that_names_nothing(
    db: Database, tmp_path: Path
) -> None:
    fields = {**layout(tmp_path), "collect_every_s": 0.01, "collection_grace_s": 0.0}
    settings = WorkerSettings.model_validate(fields)
    blobs, shutdown = BlobFolder(settings.blob_root), Shutdown()
    old, kept = blobs.put_bytes(b"old"), blobs.put_bytes(b"kept")
    for digest in (old, kept):
        os.utime(blobs.path(digest), (1e9, 1e9))
    sweeper = Sweeper(name="w", db=db, blobs=blobs, settings=settings, shutdown=shutdown)
    thread = threading.Thread(target=sweeper.run_collections)
    thread.start()
    try:
        for _ in range(3):  # the collection before this one has ended
            wait(partial(has_changed, db, turn(db)))
        assert blobs.has(old)
        with db.write() as session:
            tenant_id = access.create_tenant(session, name="acme").id
            layer = Blob(role="mask", media_type="x", digest=kept, size_bytes=4)
            made = TaskResult(
                model_id=some_model(session, tenant_id), digest=kept, provenance={}, blobs=(layer,), k=1
            )
            add_artifact(session, tenant_id=tenant_id, kind=JobKind.MASK, request={}, made=made)
        wait(lambda: not blobs.has(old))
    finally:
        shutdown.ask(0.0)
        thread.join()
    assert blobs.has(kept)


def test_a_collection_runs_although_a_rule_met_a_row_that_is_gone(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Database) -> None:
        raise NotFoundError("There is no run 'r'.")

    collected = threading.Event()
    monkeypatch.setattr("permille_workers.runtime.sweeper.rules.apply_all", gone)
    monkeypatch.setattr("permille_workers.runtime.sweeper.references", lambda _: collected.set())
    settings = WorkerSettings.model_validate({**layout(tmp_path), "collect_every_s": 0.01})
    blobs, shutdown = BlobFolder(settings.blob_root), Shutdown()
    sweeper = Sweeper(name="w", db=db, blobs=blobs, settings=settings, shutdown=shutdown)
    thread = threading.Thread(target=sweeper.run_collections)
    thread.start()
    try:
        for _ in range(2):
            assert collected.wait(60)
            collected.clear()
    finally:
        shutdown.ask(0.0)
        thread.join()


def test_a_sweep_outlives_what_nobody_thought_of_and_tells_of_a_bucket_once_when_it_goes_and_comes(
    db: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    swept = []
    missing, refused = OperatorError("expected a bucket"), OperatorError("expected rights")
    met: list[Exception | None] = [KeyError("Contents"), missing, missing, missing, refused, refused, None]

    class Odd(BlobFolder):
        def sweep(self, *, before_s: float) -> int:
            swept.append(before_s)
            failure = met[len(swept) - 1] if len(swept) <= len(met) else None
            if failure is not None:
                raise failure
            return 0

    fields = {**layout(tmp_path), "collect_every_s": 0.0, "sweep_s": 0.01}
    settings, shutdown = WorkerSettings.model_validate(fields), Shutdown()
    sweeper = Sweeper(name="w", db=db, blobs=Odd(settings.blob_root), settings=settings, shutdown=shutdown)
    thread = threading.Thread(target=sweeper.run)
    thread.start()
    try:
        wait(lambda: len(swept) > len(met) + 1)
    finally:
        shutdown.ask(0.0)
        thread.join()
    told = [record.getMessage() for record in caplog.records if "sweep" in record.getMessage()]
    away = "cannot sweep the blobs"
    assert told == [away, f"{away}: {missing}", f"{away}: {refused}", f"over: {away}"]


def test_a_step_of_a_sweep_that_fails_skips_no_other(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**layout(tmp_path), "collect_every_s": 0.0, "sweep_s": 0.01}
    settings, shutdown = WorkerSettings.model_validate(fields), Shutdown()
    blobs = BlobFolder(settings.blob_root)
    sweeper = Sweeper(name="w", db=db, blobs=blobs, settings=settings, shutdown=shutdown)
    names = [*sweeper._row_steps(), *sweeper._blob_steps()]
    ran: Counter[str] = Counter()

    def step(name: str) -> None:
        ran[name] += 1
        raise (KeyError, AWAY, OperatorError("gone"))[len(ran) % 3]

    for kind in ("_row_steps", "_blob_steps"):
        own = {name: partial(step, name) for name in getattr(sweeper, kind)()}
        monkeypatch.setattr(Sweeper, kind, lambda _, own=own: own)
    thread = threading.Thread(target=sweeper.run)
    thread.start()
    try:
        wait(lambda: min(ran[name] for name in names) >= 2)
    finally:
        shutdown.ask(0.0)
        thread.join()
    assert set(ran) == set(names)


AWAY = OperationalError("INSERT", {}, Exception("away"))


def test_an_attempt_goes_on_while_its_progress_cannot_be_written(
    db: Database, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> bool:
        raise AWAY

    clock = Seconds()
    progress = Progress(db, claim, clock=clock)
    with monkeypatch.context() as outage:
        outage.setattr(claims, "report_progress", away)
        progress(0.2, "fisher 1/5")
    clock.at = 2.0
    progress(0.4, "fisher 2/5")
    assert read(db, claim).progress == 0.4


@pytest.mark.parametrize("fault", [BlobStoreError("away"), AWAY])
def test_a_result_is_published_when_bucket_and_database_answer_again(
    db: Database, claim: Claim, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    monkeypatch.setattr(child, "_PAUSES_S", (0.0, 0.0))
    tried: list[int] = []

    def publish(_: Session) -> str:
        tried.append(len(tried))
        if len(tried) < 3:
            raise fault
        return "mask_1"

    child.publish_result(db, claim, publish)
    assert (tried, read(db, claim).result_id) == ([0, 1, 2], "mask_1")


@pytest.mark.parametrize("is_split", [False, True])
def test_a_commit_whose_answer_was_lost_is_not_made_twice(
    db: Database, claim: Claim, monkeypatch: pytest.MonkeyPatch, is_split: bool
) -> None:
    publish = child._publish

    def cut_off(*given: Any) -> None:
        publish(*given)
        raise AWAY

    monkeypatch.setattr(child, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(child, "_publish", cut_off)
    part = ShardRequest(
        model_id=f"model_{EXAMPLE_ULID}",
        scope="all",
        plan=digest_of(b""),
        first=0,
        stop=1,
        dtype="float32",
    )
    made = PartsToAdd([(JobKind.SHARD, part)]) if is_split else lambda _: "mask_1"
    with pytest.raises(StaleClaimError):
        child.publish_result(db, claim, made)
    with db.read() as session:
        parts = list(queue.parts_of(session, read(db, claim)))
    assert (len(parts), read(db, claim).result_id) == ((1, None) if is_split else (0, "mask_1"))


def turn(db: Database) -> datetime | None:
    """Return the start of the newest collection."""
    with db.read() as session:
        row = session.get(BlobCollection, 1)
    return None if row is None else row.began_at


def has_changed(db: Database, before: datetime | None) -> bool:
    return turn(db) not in (None, before)


def wait(until: Callable[[], bool]) -> None:
    """Wait until `until` returns True."""
    deadline = time.monotonic() + 120
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("permille.store.jobs.dispatch", ("celery", "kombu", "redis")),
        ("permille.store.blobs.folder", ("botocore", "boto3")),
        ("permille_workers.__main__", ("celery", "torch", "transformers")),
        ("permille_workers.runtime.child", ("torch", "transformers", "datasets")),
    ],
)
def test_processes_import_only_what_they_need(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, json, {module}; json.dump(sorted(sys.modules), sys.stdout)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert not set(absent) & set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("exc", "final"),
    [
        (InputError("bad"), True),
        (PackageError("layer-roles", "bad"), True),
        (PackageError("blob-digest", "half of it"), False),
        (PackageError("block-digest", "half of a block"), False),
        (OperatorError("bad"), True),
        (OSError(errno.ENOSPC, "disk full"), False),
        (RetryableError("later"), False),
        (OSError(errno.EIO, "wire"), False),
        (ValueError("a bug"), False),
    ],
)
def test_only_failures_that_may_pass_are_tried_again(
    db: Database, claim: Claim, exc: Exception, final: bool
) -> None:
    record_failure(db, claim, exc)
    row = read(db, claim)
    assert row.state == ("failed" if final else "queued")
    assert row.error is not None
    assert row.error["retryable"] is not final
    assert ("traceback" in row.error) is isinstance(exc, OSError | ValueError)


@pytest.mark.parametrize("has_result", [True, False])
def test_a_child_that_ends_slowly_after_its_result_has_not_lost_its_lease(
    has_result: bool,
    db: Database,
    claim: Claim,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(supervisor, "_LAST_WORDS_S", 0.0)
    settings = WorkerSettings.model_validate({"data_dir": tmp_path, "poll_s": 0.01})
    slow = (sys.executable, "-c", "import time; time.sleep(600)")
    with db.write() as session:
        claims.complete(session, claim, result_id="mask_1") if has_result else claims.release(session, claim)
    Supervisor(db=db, settings=settings, shutdown=Shutdown(), child_command=slow).run(claim)
    assert (f"lost {claim.job_id}" in caplog.text) is not has_result


def test_a_worker_that_must_stop_does_not_wait_for_a_database_that_is_away(
    db: Database, claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> bool:
        raise OperationalError("SELECT", {}, Exception("away"))

    monkeypatch.setattr(claims, "is_cancel_requested", away)
    settings = WorkerSettings.model_validate({"data_dir": tmp_path, "poll_s": 0.01, "lease_s": 30.0})
    shutdown, begun = Shutdown(), time.monotonic()
    shutdown.ask(0.0)
    slow = (sys.executable, "-c", "import time; time.sleep(600)")
    Supervisor(db=db, settings=settings, shutdown=shutdown, child_command=slow).run(claim)
    assert time.monotonic() - begun < 20.0


def test_a_child_that_dies_before_it_gets_its_claim_is_a_crash(
    db: Database, claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*given: Any) -> bytes:
        time.sleep(0.5)
        return encode_handover(*given)

    monkeypatch.setattr(supervisor, "encode_handover", late)
    settings = WorkerSettings.model_validate({"data_dir": tmp_path, "poll_s": 0.01})
    Supervisor(db=db, settings=settings, shutdown=Shutdown(), child_command=("false",)).run(claim)
    error = read(db, claim).error
    assert error is not None and "exit status 1" in str(error["message"])


def test_a_wait_that_the_hub_asks_for_spends_no_attempt(db: Database, claim: Claim) -> None:
    record_failure(db, claim, RetryableError("busy", retry_after_s=196))
    row = read(db, claim)
    assert (row.state, row.attempt) == ("queued", 0)
    assert 190 < (row.available_at - row.updated_at).total_seconds() <= 197
