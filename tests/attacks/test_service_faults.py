"""Faults of the service's own machine: a bad disk, a jumping clock, other schemas, damaged databases.

All processes are real.
"""

import json
import os
import resource
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from permille.trust.roles import TIMESTAMP_FILE
from tests.acceptance.test_restore import add, commands, publish, type_in
from tests.api_service import Api, TestDevice, running_api
from tests.attacks.test_full_disk import fill, small_disk
from tests.integration.job_site import stopped_unlocked
from tests.preloaded import children, run
from tests.running_service import Running, environment, running_service
from tests.tiny_model import write_model
from tests.unit.store.conftest import Clock

YEAR = timedelta(days=366)
SHIM = Path(__file__).with_name("shifted_clock.c")
MIGRATION = (sys.executable, "-m", "permille.store.migrations.schema")
WAIT_S = 120.0


def wait_until(is_so: Callable[[], bool], why: Callable[[], str] = lambda: "too late") -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)


def migrate(data_dir: Path, *, limit: int | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the migrations of a data folder. No file may become larger than `limit` bytes."""
    before = None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    settings = environment(PERMILLE_DATA_DIR=str(data_dir))
    return subprocess.run(
        MIGRATION, env=settings, preexec_fn=before, capture_output=True, text=True, timeout=60, check=False
    )


@contextmanager
def read_only(folder: Path, *, is_disk: bool) -> Iterator[None]:
    """Make a folder read-only: by remounting its disk as root, or by its mode."""
    if is_disk:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    else:
        folder.chmod(0o500)
    yield
    if is_disk:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    else:
        folder.chmod(0o700)


@pytest.mark.slow
@pytest.mark.attack(19, "the disk is full, or read-only, while the schema is made")
def test_a_migration_on_a_bad_disk_says_so_in_a_line_and_can_be_repeated(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk) as is_disk:
        data_dir = disk / "data"
        data_dir.mkdir()
        with read_only(disk if is_disk else data_dir, is_disk=is_disk):
            done = migrate(data_dir)
            assert done.returncode == 2
            assert done.stderr.startswith("permille: ") and done.stderr.count("\n") == 1, done.stderr
            assert "unable to open database file" in done.stderr
        if is_disk:
            fill(disk)
            os.truncate(disk / "filler", (disk / "filler").stat().st_size - (350 << 10))
        done = migrate(data_dir, limit=None if is_disk else 350 << 10)
        assert done.returncode == 75, done.stderr
        assert done.stderr.startswith("permille: ") and done.stderr.count("\n") == 1, done.stderr
        assert not is_disk or "the disk of the database is full" in done.stderr
        (disk / "filler").unlink(missing_ok=True)
        assert migrate(data_dir).returncode == 0


@pytest.mark.slow
@pytest.mark.attack(19, "the disk of database and keys is full while a release is signed")
def test_a_release_that_cannot_be_signed_or_written_is_not_published(tmp_path: Path) -> None:
    disk, keys = tmp_path / "disk", tmp_path / "keys"
    with small_disk(disk) as is_disk, small_disk(keys) as keys_are_disk:
        settings = {
            "PERMILLE_DATABASE_URL": f"sqlite:///{disk / 'permille.db'}",
            "PERMILLE_PRIVATE_DIR": str(keys / "private"),
        }
        if not is_disk:
            settings.pop("PERMILLE_DATABASE_URL")
        with running_service(tmp_path, "--no-worker", **settings) as running, running.client() as client:
            url = settings.get("PERMILLE_DATABASE_URL", f"sqlite:///{running.data_dir}/permille.db")
            again = {"name": "tiny", "package_digest": add(running, 0, url=url), "alias": "stable"}
            assert client.post("/v1/releases", json=again).status_code == 201
            rotation = {"roles": [{"role": "timestamp"}]}
            folder = keys / "private" / "keys" / "trust"
            with read_only(keys if keys_are_disk else next(folder.iterdir()), is_disk=keys_are_disk):
                refused = client.post("/v1/trust/rotations", json=rotation)
                assert refused.status_code == 503, refused.text
                assert "the folder of keys cannot be written" in refused.json()["detail"]
            assert client.post("/v1/trust/rotations", json=rotation).status_code == 200
            before = client.get(f"/v1/trust/metadata/{TIMESTAMP_FILE}").content
            with _without_space(running, disk, is_disk=is_disk):
                refused = client.post("/v1/releases", json=again)
                assert refused.status_code == 503, refused.text
                assert "database" in refused.json()["detail"]
                assert client.get(f"/v1/trust/metadata/{TIMESTAMP_FILE}").content == before
                assert [one["version"] for one in client.get("/v1/releases").json()["items"]] == [1]
            assert client.post("/v1/releases", json=again).json()["version"] == 2


@contextmanager
def _without_space(running: Running, disk: Path, *, is_disk: bool) -> Iterator[None]:
    """Let no byte be written. The write-ahead log beside the database cannot grow either."""
    if is_disk:
        fill(disk)
        with running.client() as client:  # Write until the log is full as well.
            corpus = {"source": {"kind": "streamed", "dataset": "c4"}}
            names = (f"c{number}" for number in range(1000))
            while client.post("/v1/corpora", json={**corpus, "name": next(names)}).status_code == 201:
                pass
        yield
        (disk / "filler").unlink()
        return
    _, hard = resource.prlimit(running.api_pid, resource.RLIMIT_FSIZE)
    resource.prlimit(running.api_pid, resource.RLIMIT_FSIZE, (0, hard))
    yield
    resource.prlimit(running.api_pid, resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.slow
@pytest.mark.attack(19, "the disk is full when the timestamp is due: devices are to be cut off")
def test_a_timestamp_that_cannot_be_renewed_is_served_until_it_ends(tmp_path: Path) -> None:
    clock, path = Clock(), f"/v1/trust/metadata/{TIMESTAMP_FILE}"
    clock.at = datetime.now(UTC)
    with running_api(tmp_path, clock=clock) as api:
        api.publish(api.package())
        first = api.get(path).content
        clock.forward(13 * 3600)
        with _nothing_written():
            kept = api.get(path)
        assert (kept.status_code, kept.content) == (200, first)
        renewed = api.get(path).content
        assert renewed != first
        clock.forward(25 * 3600)
        with _nothing_written():
            assert api.get(path).status_code == 503
        assert api.get(path).json()["signed"]["version"] > json.loads(renewed)["signed"]["version"]


@contextmanager
def _nothing_written() -> Iterator[None]:
    """Let no file of this process grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class ShiftedClock:
    """The clock of processes that are started with `settings`. `jump` sets its error."""

    def __init__(self, folder: Path) -> None:
        library = folder / "shifted_clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl"], check=True)
        self._path = folder / "shift"
        self.settings = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(self._path)}
        self._path.write_bytes(bytes(8))

    def jump(self, by: timedelta) -> None:
        with self._path.open("r+b") as file:
            file.write(struct.pack("=q", int(by.total_seconds())))


@pytest.mark.slow
@pytest.mark.attack(19, "the service's clock jumps a year ahead, then two years back")
def test_jobs_tokens_and_releases_outlive_a_clock_that_jumps(tmp_path: Path) -> None:
    clock = ShiftedClock(tmp_path)
    settings = {"PERMILLE_POLL_S": "0.1", "PERMILLE_SWEEP_S": "0.2", **clock.settings}
    with running_service(tmp_path, **settings) as running, running.client() as client:
        write_model(running.data_dir / "models" / "tiny")
        source = {"name": "tiny", "source": {"kind": "folder", "path": "tiny"}}
        model_id = client.post("/v1/models", json=source).raise_for_status().json()["id"]
        publish(running, 0)
        api: Any = _OverHttp(client, running.token)
        invited = client.post("/v1/invitations", json={"release": "tiny", "alias": "stable"}).json()
        device = TestDevice(api=api, key=_new_key())
        device.id = device.enrol(invited["invitation"]).json()["device_id"]
        token = device.token()
        assert _look(client, token) == 200
        _make_mask(client, model_id, 1)
        _check_timestamp(client, timedelta())

        clock.jump(YEAR)
        assert client.get("/v1/health").status_code == 200
        assert _look(client, token) == 401
        ahead = device.token()
        assert _look(client, ahead) == 200
        _make_mask(client, model_id, 2)
        _check_timestamp(client, YEAR)
        worker = _worker_pid(running)
        # A stopped worker claims nothing, so the next job waits. If it stopped in a transaction, it would
        # block the API.
        wait_until(lambda: stopped_unlocked(running.data_dir / "permille.db", worker))
        waiting = _ask_mask(client, model_id, 3)

        clock.jump(-YEAR)
        os.kill(worker, signal.SIGKILL)
        assert client.get("/v1/health").status_code == 200
        _wait_for(client, waiting)
        _make_mask(client, model_id, 4)
        assert _look(client, device.token()) == 200
        _check_timestamp(client, -YEAR)
        assert (
            "the clock was set back, so the due times and leases of 1 jobs were corrected"
            in (tmp_path / "up.log").read_text()
        )


class _OverHttp:
    """The part of `tests.api_service.Api` that `TestDevice` needs, over HTTP."""

    def __init__(self, client: httpx.Client, token: str) -> None:
        self.client, self.token = client, token


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate()


def _look(client: httpx.Client, token: str) -> int:
    """Ask for the device's own data. Return the status."""
    return client.get("/v1/device", headers={"Authorization": f"Bearer {token}"}).status_code


def _ask_mask(client: httpx.Client, model_id: str, seed: int) -> str:
    asked = {"model_id": model_id, "method": "random", "density": 0.01, "seed": seed}
    job_id: str = client.post("/v1/masks", json=asked).raise_for_status().json()["id"]
    return job_id


def _wait_for(client: httpx.Client, job_id: str) -> None:
    def state() -> str:
        return str(client.get(f"/v1/jobs/{job_id}").json()["state"])

    wait_until(lambda: state() not in ("queued", "running"), state)
    assert state() == "succeeded"


def _make_mask(client: httpx.Client, model_id: str, seed: int) -> None:
    _wait_for(client, _ask_mask(client, model_id, seed))


def _check_timestamp(client: httpx.Client, shift: timedelta) -> None:
    """Check that the timestamp expires within a day by the service's clock."""
    signed = client.get(f"/v1/trust/metadata/{TIMESTAMP_FILE}").raise_for_status().json()["signed"]
    left = datetime.fromisoformat(signed["expires"]) - (datetime.now(UTC) + shift)
    assert timedelta(0) < left <= timedelta(days=1, hours=1), signed


def _worker_pid(running: Running) -> int:
    return children(running.process.pid)[1]


@pytest.mark.attack(19, "a worker goes on while a newer version has changed the schema")
def test_a_worker_of_another_schema_claims_nothing(tmp_path: Path) -> None:
    settings = {"PERMILLE_POLL_S": "0.1", "PERMILLE_SWEEP_S": "0.2"}
    with running_service(tmp_path, **settings) as running, running.client() as client:
        write_model(running.data_dir / "models" / "tiny")
        source = {"name": "tiny", "source": {"kind": "folder", "path": "tiny"}}
        model_id = client.post("/v1/models", json=source).raise_for_status().json()["id"]
        _make_mask(client, model_id, 1)
        _set_schema(running, "9999")
        log = tmp_path / "up.log"
        wait_until(lambda: "the database has schema 9999, this process knows 0001" in log.read_text())
        job_id = _ask_mask(client, model_id, 2)
        settings = environment(PERMILLE_DATA_DIR=str(running.data_dir))
        another = run([sys.executable, "-m", "permille_workers"], env=settings)
        assert another.returncode == 2
        assert "its schema is 9999" in another.stderr
        assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"
        _set_schema(running, "0001")
        _wait_for(client, job_id)


def _set_schema(running: Running, version: str) -> None:
    with closing(sqlite3.connect(running.data_dir / "permille.db", timeout=30)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = ?", (version,))


@pytest.mark.attack(19, "the database is backed up while it is written")
def test_the_guides_backup_of_a_busy_database_is_whole(tmp_path: Path) -> None:
    (block,) = commands("back-up.md")
    with running_service(tmp_path, "--no-worker") as running:
        publish(running, 0)
        made, stop = list[str](), threading.Event()

        def write() -> None:
            with running.client() as client:
                while not stop.is_set():
                    name, source = f"c{len(made)}", {"kind": "streamed", "dataset": "c4"}
                    body = {"name": name, "source": source}
                    client.post("/v1/corpora", json=body).raise_for_status()
                    made.append(name)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            wait_until(lambda: len(made) > 20)
            before = list(made)
            type_in(block, tmp_path, running.data_dir)
            wait_until(lambda: len(made) > len(before))
        finally:
            stop.set()
            writer.join()
    with closing(sqlite3.connect(tmp_path / "backup" / "permille.db")) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        kept = {name for (name,) in copy.execute("SELECT name FROM corpora")}
    assert kept.issuperset(before)


@pytest.mark.attack(19, "a file copied from under the running service is started from")
@pytest.mark.parametrize("how", ["cut", "torn"])
def test_a_damaged_copy_of_a_database_is_refused_in_a_line(tmp_path: Path, how: str) -> None:
    data_dir = tmp_path / "copy"
    with running_service(tmp_path, "--no-worker") as running:
        publish(running, 0)
        shutil.copytree(running.data_dir, data_dir)  # The write-ahead log is deleted below.
    path = data_dir / "permille.db"
    for beside in data_dir.glob("permille.db-*"):
        beside.unlink()
    with path.open("r+b") as file:
        size = path.stat().st_size
        if how == "cut":
            file.truncate(size // 2 // 4096 * 4096)
        else:
            file.seek(4096)
            file.write(bytes(size - 4096))
    done = migrate(data_dir)
    assert done.returncode == 2
    assert done.stderr.startswith("permille: ") and done.stderr.count("\n") == 1, done.stderr
    assert "the database is damaged" in done.stderr and "Restore a backup" in done.stderr


@pytest.mark.attack(19, "pages of the database go bad while the service runs")
def test_a_database_that_goes_bad_is_named(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        _damage(api)
        answer = api.get("/v1/corpora")
        assert answer.status_code == 503, answer.text
        assert "the database is damaged" in answer.json()["detail"]


def _damage(api: Api) -> None:
    """Overwrite the pages of a table."""
    path = api.service.settings.data_dir / "permille.db"
    for number in range(3):
        body = {"name": f"c{number}", "source": {"kind": "streamed", "dataset": "c4"}}
        assert api.post("/v1/corpora", body).status_code == 201
    api.service.close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        named = "SELECT rootpage FROM sqlite_master WHERE name LIKE '%corpora%'"
        pages = [page for (page,) in database.execute(named)]
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * 4096)
            file.write(b"\xff" * 4096)
