"""Reads that run in the event loop: what they use, and what a database does to them that is slow or gone."""

import asyncio
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from anyio import to_thread
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.util.concurrency import await_only, greenlet_spawn

from permille.schemas.problems import ProblemType
from permille.store import database
from permille.store.database import Database
from permille_service import console, routing
from tests.api_service import Api, running_api
from tests.unit.store.postgres import Server, postgres_server

READS = 3
LONG_S = 60.0


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path) as running:
        yield running


def test_reads_by_key_take_no_thread(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    package = api.package()
    api.publish(package)
    token = api.device().token()
    own = [job_path(api), f"/v1/packages/{package.digest}"]
    devices = [
        "/v1/releases/tiny/aliases/stable",
        "/v1/trust/metadata/timestamp.json",
        "/v1/device/federations",
    ]
    asked = [*((path, None) for path in own), *((path, token) for path in devices)]
    for path, caller in asked:
        api.get(path, caller)  # callers are noted as seen

    async def refuse(*_: object) -> None:
        raise AssertionError("expected no thread")

    monkeypatch.setattr(routing, "run_in_threadpool", refuse)
    assert [api.get(path, caller).status_code for path, caller in asked] == [200] * len(asked)
    others = [path[:-1] + ("1" if path.endswith("0") else "0") for path in own]
    assert [api.get(path).status_code for path in others] == [404] * len(own)


def test_a_session_is_refused_in_the_loop(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold up every other request while a server or a lock is waited for."""
    monkeypatch.setattr(Database, "look", Database.read)
    assert api.get(job_path(api)).status_code == 500


def test_a_read_that_meets_a_lock_waits_for_it_in_a_thread(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    path, in_thread = job_path(api), threading.Event()

    async def noted(*arguments: Any) -> Any:
        in_thread.set()
        return await run_in_threadpool(*arguments)

    monkeypatch.setattr(routing, "run_in_threadpool", noted)
    api.service.database.close()
    other = sqlite3.connect(
        api.service.settings.data_dir / "permille.db", isolation_level=None, check_same_thread=False
    )
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(api.get, path)
        assert in_thread.wait(LONG_S)
        assert api.client.get("/livez").status_code == 200
        other.close()
        assert answer.result().status_code == 200


def test_a_server_that_hangs_stops_neither_the_loop_nor_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LEFT_MS", 1000)
    with postgres_server() as server, running_api(tmp_path, database_url=server.url) as api:
        path, unavailable = job_path(api), ProblemType.UNAVAILABLE.uri
        assert api.get(path).status_code == 200
        assert api.client.get("/readyz").status_code == 200
        monkeypatch.setattr(routing, "ANSWER_S", 0.5)
        monkeypatch.setattr(console, "ANSWER_S", 0.5)
        monkeypatch.setattr(console, "EVERY_S", 0.0)
        with ThreadPoolExecutor(READS) as pool, stopped(server):
            answers = [pool.submit(api.get, path) for _ in range(READS)]
            assert {answer.result(LONG_S).json()["type"] for answer in answers} == {unavailable}
            assert api.client.get("/livez").status_code == 200
            asked = [pool.submit(api.client.get, "/readyz") for _ in range(READS)]
            assert {answer.result(LONG_S).json()["type"] for answer in asked} == {unavailable}
            threads = threading.active_count()
            assert api.client.get("/readyz").json()["type"] == unavailable
            assert threading.active_count() <= threads, "expected all who ask to wait for one look"
        with ThreadPoolExecutor(READS) as pool, psycopg.connect(server.url.replace("+psycopg", "")) as other:
            other.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            answers = [pool.submit(api.get, path) for _ in range(READS)]
            assert {answer.result(LONG_S).json()["type"] for answer in answers} == {unavailable}
            begun, waits = time.monotonic(), "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            while other.execute(waits).fetchone():
                assert time.monotonic() - begun < LONG_S, "expected the server to leave what nobody waits for"
                other.execute("SELECT pg_stat_clear_snapshot()")
                time.sleep(0.05)
        monkeypatch.setattr(routing, "ANSWER_S", LONG_S)
        monkeypatch.setattr(console, "ANSWER_S", LONG_S)
        assert api.get(path).status_code == 200
        assert api.client.get("/readyz").status_code == 200
        monkeypatch.setattr(routing, "TRY_S", 0.1)
        with psycopg.connect(server.url.replace("+psycopg", "")) as other:
            other.execute("UPDATE operator_tokens SET last_used_at = NULL")
            other.commit()
            other.execute("SELECT 1 FROM operator_tokens FOR UPDATE")
            assert api.get(path).status_code == 200, (
                "expected a read that does not wait for the caller's note"
            )
        server.crash()
        assert api.get(path).status_code == 200, "expected a new connection in place of the broken one"


def test_who_waits_for_a_connection_is_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one of fifty waited for half a second, where most had their answer in ten milliseconds."""
    monkeypatch.setattr(database, "_LOOP_CONNECTIONS", 1)
    rows, order = Database(f"sqlite:///{tmp_path}/empty.db"), []

    def ask(*names: str) -> None:
        for name in names:
            with rows.look():
                await_only(asyncio.sleep(0))
                order.append(name)

    async def main() -> None:
        await asyncio.gather(greenlet_spawn(ask, "first", "later"), greenlet_spawn(ask, "waiting"))

    asyncio.run(main())
    rows.close()
    assert order == ["first", "waiting", "later"]


def test_a_thread_that_nobody_waits_for_counts_until_it_ends() -> None:
    begun, end = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        end.wait(LONG_S)

    async def leave() -> None:
        threads = to_thread.current_default_thread_limiter()
        asked = asyncio.create_task(greenlet_spawn(routing.in_thread, hang))
        assert await asyncio.to_thread(begun.wait, LONG_S)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled() and threads.borrowed_tokens == 1
        end.set()
        while threads.borrowed_tokens:
            await asyncio.sleep(0.01)

    asyncio.run(leave())


def job_path(api: Api) -> str:
    """The path of a job that is there."""
    api.package()
    return f"/v1/jobs/{api.get('/v1/jobs').json()['items'][0]['id']}"


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """A server that answers nothing, though the system keeps its connections."""
    processes = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
