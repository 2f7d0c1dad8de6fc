"""Tests of collections: old blobs without a row are deleted, and blobs that a job will reference are not."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import delete, text
from sqlalchemy.exc import OperationalError

from permille.digests import digest_of
from permille.errors import RetryableError
from permille.package.blobs import BlobFolder, StoredBlob
from permille.schemas.inputs import FolderModel
from permille.schemas.jobs import JobKind
from permille.store import artifacts, inputs
from permille.store.artifacts import Blob, TaskResult
from permille.store.blobs.folder import BlobCache, BucketFolder
from permille.store.database import Database, make_engine
from permille.store.errors import BlobStoreError
from permille.store.inputs import ModelFacts
from permille.store.jobs import claims, queue
from permille.store.jobs.transitions import NewJob
from permille.store.retention import collection
from permille.store.retention.collection import NAMING, references
from permille.store.settings import StoreSettings, layout
from permille.store.tables import ArtifactBlob, ArtifactSource, Base, BlobCollection
from tests.artifacts import add_artifact, some_model
from tests.bucket_site import Fault, bucket_server, gate
from tests.unit.store.conftest import Clock

DAY_S = 86_400.0
END_OTHERS = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE datname = current_database() AND state = 'idle in transaction'"""
NAMES_NO_BLOB = {
    "artifacts.digest": "of the files of a sparse model, else of one of its blobs",
    "audit_entries.digest": "of the entry",
    "federations.definition_digest": "of bytes in the row",
    "federations.package_digest": "a package's row, which cannot go",
    "federations.state_digest": "of a checkpoint's state",
    "idempotent_answers.request_digest": "of a request",
    "jobs.request_digest": "of a request",
    "models.digest": "of the list of its files",
    "participations.digest": "of bytes in the row",
    "releases.package_digest": "a package's row, which cannot go",
    "rounds.start_digest": "of a state",
    "rounds.state_digest": "of a state",
    "runs.log_digest": "of an upload, which has a store of its own",
    "runs.state_digest": "of a state",
}


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    """Return settings with a grace period of one day."""
    return StoreSettings.model_validate(layout(tmp_path))


@pytest.fixture
def blobs(settings: StoreSettings) -> BlobFolder:
    """Return the shared blob folder."""
    return BlobFolder(settings.blob_root)


def put(blobs: BlobFolder, data: bytes, clock: Clock, *, age_s: float = 2 * DAY_S) -> str:
    """Store bytes with a modification time `age_s` seconds ago."""
    digest = blobs.put_bytes(data)
    at = clock.at.timestamp() - age_s
    os.utime(blobs.path(digest), (at, at))
    return digest


def name(db: Database, tenant_id: str, digest: str, kind: JobKind = JobKind.MASK) -> str:
    """Add an artifact that references a blob. Return its id."""
    with db.write() as session:
        layer = Blob(role="mask", media_type="x", digest=digest, size_bytes=1)
        made = TaskResult(
            model_id=some_model(session, tenant_id), digest=digest, provenance={}, blobs=(layer,), k=1
        )
        return add_artifact(session, tenant_id=tenant_id, kind=kind, request={}, made=made).id


def test_every_column_with_a_digest_names_blobs_or_is_known_not_to() -> None:
    found = {
        f"{table.name}.{column.name}"
        for table in Base.metadata.tables.values()
        for column in table.columns
        if column.name.endswith("digest")
    }
    naming = {f"{column.class_.__tablename__}.{column.key}" for column in NAMING}
    assert found == naming | set(NAMES_NO_BLOB)
    assert not naming & set(NAMES_NO_BLOB)


def test_what_no_row_names_goes_once_it_is_old(
    db: Database, blobs: BlobFolder, settings: StoreSettings, tenant_id: str, clock: Clock
) -> None:
    named, old = put(blobs, b"named", clock), put(blobs, b"old", clock)
    young = put(blobs, b"young", clock, age_s=DAY_S / 2)
    below = blobs.below("uploads", "some")
    put(below, b"an upload", clock)
    name(db, tenant_id, named)
    wanted = collection.collect(db, blobs, settings, dry_run=True)
    assert (wanted.removed, blobs.has(old)) == ({old: 3}, True)
    assert wanted.unreferenced == {old: 3, young: 5}
    assert collection.collect(db, blobs, settings).removed == {old: 3}
    assert {blob.digest for blob in blobs.entries()} == {named, young}
    assert len(list(below.entries())) == 1
    with db.read() as session:
        row = session.get_one(BlobCollection, 1)
        assert (row.unreferenced_bytes, row.ended_at) == (5, clock.at)
        assert references(session) == {named}
    clock.forward(DAY_S)
    assert collection.collect(db, blobs, settings).removed == {young: 5}


def test_a_blob_that_cannot_be_deleted_stops_no_other(
    db: Database, blobs: BlobFolder, settings: StoreSettings, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    first, middle, last = sorted(put(blobs, data, clock) for data in (b"1", b"2", b"3"))
    stuck = blobs.path(middle)
    stuck.unlink()
    stuck.mkdir()  # `unlink` fails at a folder, whoever calls it
    os.utime(stuck, (0, 0))
    assert collection.collect(db, blobs, settings).removed == {first: 1, last: 1}
    assert f"cannot delete blob {middle}" in caplog.text


def test_what_was_stored_since_a_running_attempt_began_stays(
    db: Database, blobs: BlobFolder, settings: StoreSettings, tenant_id: str, clock: Clock
) -> None:
    with db.write() as session:
        queue.submit(session, NewJob(tenant_id=tenant_id, kind=JobKind.MASK, payload={}))
        claim = claims.claim(session, worker="w", lease_s=60)
    assert claim is not None
    clock.forward(3 * DAY_S)
    made = put(blobs, b"made on its second day", clock)
    assert collection.collect(db, blobs, settings).removed == {}
    with db.write() as session:
        claims.cancelled(session, claim)
    assert list(collection.collect(db, blobs, settings).removed) == [made]


def test_whoever_names_what_was_collected_is_told_to_store_it_again(
    db: Database, blobs: BlobFolder, settings: StoreSettings, tmp_path: Path, clock: Clock
) -> None:
    digest = put(blobs, b"old", clock)
    collection.collect(db, blobs, settings)
    with pytest.raises(RetryableError, match="was deleted before"), db.write() as session:
        collection.hold(session, blobs, [digest])
    with pytest.raises(RetryableError, match="folder"), db.write() as session:
        collection.hold(session, blobs, [blobs.put_bytes(b"old")], tmp_path / "folder")
    with db.write() as session:
        collection.hold(session, blobs, [digest], tmp_path)


def test_a_job_that_names_what_was_there_before_it_does_not_lose_it(
    db: Database, blobs: BlobFolder, settings: StoreSettings, tenant_id: str, clock: Clock
) -> None:
    """Jobs reference old bytes and drop their references, while two collectors run all the time."""
    most, stop = settings.model_copy(update={"collection_grace_s": 0.0}), threading.Event()
    with db.write() as session:
        model_id = some_model(session, tenant_id)
    refused, lost = [0], []

    def publish(number: int) -> None:
        data = b"layer %d" % number
        while True:
            digest = blobs.put_bytes(data)  # years old by the tests' clock, so its age does not protect it
            try:
                with db.write() as session:
                    job = queue.submit(session, NewJob(tenant_id=tenant_id, kind=JobKind.MASK, payload={}))
                    session.flush()
                    collection.hold(session, blobs, [digest])
                    claim = claims.Claim(
                        job_id=job.id,
                        tenant_id=tenant_id,
                        kind="mask",
                        payload={},
                        fence=0,
                        attempt=1,
                        max_attempts=1,
                    )
                    layer = Blob(role="mask", media_type="x", digest=digest, size_bytes=1)
                    made = TaskResult(model_id=model_id, digest=digest, provenance={}, blobs=(layer,))
                    row = artifacts.add(session, job=claim, made=made)
                break
            except RetryableError:
                refused[0] += 1
        if not blobs.has(digest):
            lost.append(digest)
        with db.write() as session:
            for table in (ArtifactBlob, ArtifactSource):
                session.execute(delete(table).where(table.artifact_id == row.id))

    def collect() -> int:
        removed = 0
        while not stop.is_set():
            removed += len(collection.collect(db, blobs, most).removed)
        return removed

    with ThreadPoolExecutor(4) as pool:
        collecting = [pool.submit(collect) for _ in range(2)]
        try:
            for _ in pool.map(publish, (number % 5 for number in range(40))):
                pass
        finally:
            stop.set()
        removed = sum(one.result() for one in collecting)
    assert not lost
    assert removed > 0, "nothing was ever collected: the test shows nothing"


def test_a_collector_deletes_nothing_whose_lock_is_gone(
    db: Database, blobs: BlobFolder, settings: StoreSettings, clock: Clock
) -> None:
    """At the last check of a blob, the collector's session on PostgreSQL is ended.

    On SQLite, the collector holds the lock, so no other connection can write at that time.
    """
    old, others = put(blobs, b"old", clock), make_engine(db.url)

    class Late(BlobFolder):
        deletes = False

        def hurried(self) -> BlobFolder:
            self.deletes = True
            return self

        def entry(self, digest: str) -> StoredBlob | None:
            found = super().entry(digest)
            with others.connect() as connection:
                if self.deletes and db.url.startswith("postgresql"):
                    connection.execute(text(END_OTHERS))
                elif self.deletes:
                    connection.execute(text("PRAGMA busy_timeout = 0"))
                    with pytest.raises(OperationalError, match="locked"):
                        connection.execute(text("DELETE FROM jobs"))
            return found

    late = Late(blobs.root)
    told = pytest.raises(OperationalError) if db.url.startswith("postgresql") else nullcontext()
    try:
        with told:
            collection.collect(db, late, settings)
    finally:
        others.dispose()
    assert late.deletes
    assert blobs.has(old) == db.url.startswith("postgresql")


IN_A_PROCESS = """
import os, resource, signal, sys
from pathlib import Path
from permille.package.blobs import BlobFolder
from permille.store.database import Database
from permille.store.retention.collection import collect
from permille.store.settings import StoreSettings, layout

class Killed(BlobFolder):
    def delete(self, digest):
        if len(list(self.entries())) <= 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().delete(digest)

root, url, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
settings = StoreSettings.model_validate({**layout(root), "database_url": url, "collection_grace_s": 0})
db = Database(url)
with db.read() as session:
    session.connection()
if how == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no byte can be written to any file
collect(db, (Killed if how == "killed" else BlobFolder)(settings.blob_root), settings)
"""


def collect_in_a_process(db: Database, root: Path, how: str) -> int:
    command = [sys.executable, "-c", IN_A_PROCESS, str(root), db.url, how]
    return subprocess.run(command, timeout=120, check=False, stderr=subprocess.DEVNULL).returncode


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_collection_that_is_killed_leaves_nothing_to_mend(
    db: Database, blobs: BlobFolder, settings: StoreSettings, tenant_id: str, tmp_path: Path, clock: Clock
) -> None:
    kept = put(blobs, b"kept", clock)
    name(db, tenant_id, kept)
    for number in range(6):
        digest = blobs.put_bytes(b"%d" % number)
        os.utime(blobs.path(digest), (1e9, 1e9))
    assert collect_in_a_process(db, tmp_path, "killed") == -signal.SIGKILL
    assert len(list(blobs.entries())) == 3
    with db.write() as session:  # no lock of the killed process is left
        collection.hold(session, blobs, [kept])
    collection.collect(db, blobs, settings)
    assert [blob.digest for blob in blobs.entries()] == [kept]


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_blobs_go_though_the_disk_is_full(db: Database, blobs: BlobFolder, tmp_path: Path) -> None:
    os.utime(blobs.path(blobs.put_bytes(b"old")), (1e9, 1e9))
    assert collect_in_a_process(db, tmp_path, "full") == 0
    assert list(blobs.entries()) == []
    with db.read() as session:
        assert session.get(BlobCollection, 1) is None, (
            "what was found could be written: the disk was not full"
        )


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_bucket_is_collected_as_a_folder_is(
    db: Database, settings: StoreSettings, tenant_id: str, tmp_path: Path, clock: Clock
) -> None:
    with bucket_server() as server, gate(server) as site:
        blobs = BucketFolder(site.open(attempts=5), BlobCache(tmp_path / "cache", 1 << 20))
        named, old = blobs.put_bytes(b"named"), blobs.put_bytes(b"old")
        below = blobs.below("uploads", "some")
        upload = below.put_bytes(b"an upload")
        name(db, tenant_id, named)
        assert collection.collect(db, blobs, settings, dry_run=True).removed == {old: 3}
        site.faults = [Fault("^DELETE ", status=503, times=9)]
        with pytest.raises(BlobStoreError):
            collection.collect(db, blobs, settings)
        assert len(site.sent("^DELETE ")) == 2, "others wait for their turn to write: it gives up soon"
        site.faults = []
        assert collection.collect(db, blobs, settings).removed == {old: 3}
        assert [[blob.digest for blob in store.entries()] for store in (blobs, below)] == [[named], [upload]]
        with pytest.raises(RetryableError, match="was deleted before"), db.write() as session:
            collection.hold(session, blobs, [named, old])
        blobs.put_bytes(b"young")
        clock.at = datetime.now(UTC)
        assert collection.collect(db, blobs, settings).removed == {}


def test_one_collects_for_all(db: Database, clock: Clock) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda _: collection.take_turn(db, 3600), range(4))) == 1
    assert not collection.take_turn(db, 3600)
    clock.forward(3600)
    assert collection.take_turn(db, 3600)


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_files_of_a_sparse_model_go_with_its_row(
    db: Database,
    blobs: BlobFolder,
    settings: StoreSettings,
    tenant_id: str,
    other_tenant_id: str,
    clock: Clock,
) -> None:
    digests = [digest_of(bytes([number])) for number in range(4)]
    used, unused, young, foreign = map(inputs.sparsified_path, digests)
    root, other = settings.model_root, settings.tenant_root / other_tenant_id / "models"
    left = f"{inputs.SPARSIFIED}/.job_gone"
    own, hidden = f"{inputs.SPARSIFIED}/my-own-model", f"{inputs.SPARSIFIED}/.cache"
    kept = [root / one for one in (used, young, own, hidden)]
    for place in (*kept, root / unused, other / foreign, root / left):
        place.mkdir(parents=True)
        (place / "model.safetensors").write_bytes(b"weights")
        old = clock.at - timedelta(days=2)
        os.utime(place, (old.timestamp(),) * 2)
    os.utime(root / young, (clock.at.timestamp(),) * 2)
    facts = ModelFacts(
        family="llama",
        config={},
        size_bytes=1,
        parameter_count=1,
        scoped_parameter_count=1,
        digest=digests[0],
    )
    with db.write() as session:
        for owner, given in ((tenant_id, facts), (other_tenant_id, facts)):
            source = FolderModel(kind="folder", path="anything")
            inputs.add_model(session, tenant_id=owner, name="m", source=source, facts=given)
    wanted = {unused: 7, foreign: 7, left: 7}
    assert collection.collect(db, blobs, settings, dry_run=True).removed == wanted
    assert (root / unused).is_dir()
    assert collection.collect(db, blobs, settings).removed == wanted
    assert sorted((root / inputs.SPARSIFIED).iterdir()) == sorted(kept), "what no job has made stays"
    assert list((other / inputs.SPARSIFIED).iterdir()) == []
