"""Requests that wait for each other, for locks, or for a database that hangs. Meanwhile, health answers."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from permille.schemas.problems import ProblemType
from permille.store import database, rows
from permille.store.database import Patience
from permille_service import app, health
from tests.api_service import Api, running_api
from tests.unit.store.postgres import Server, postgres_server

READS = 3
THREADS = 40  # the default of anyio
LONG_S = 60.0


def test_a_service_whose_threads_are_all_busy_is_alive_and_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, end, list_all = threading.Semaphore(0), threading.Event(), rows.list_all

    def wait(session: Session, *arguments: Any, **options: Any) -> Any:
        session.execute(text("SELECT 1"))  # this takes a connection
        entered.release()
        end.wait(LONG_S)
        return list_all(session, *arguments, **options)

    with running_api(tmp_path) as api:
        monkeypatch.setattr(rows, "list_all", wait)
        monkeypatch.setattr(health, "EVERY_S", 0.0)
        with ThreadPoolExecutor(THREADS + 5) as pool:
            answers = [pool.submit(api.get, "/v1/corpora") for _ in range(THREADS + 5)]
            assert all(entered.acquire(timeout=LONG_S) for _ in range(THREADS))
            assert api.client.get("/livez").status_code == 200
            monkeypatch.setattr(health, "ANSWER_S", 0.2)
            refused = api.client.get("/readyz")
            assert (refused.status_code, refused.json()["detail"]) == (
                503,
                "a thread for requests did not answer in time",
            )
            monkeypatch.setattr(health, "ANSWER_S", LONG_S)
            end.set()
            assert {answer.result(LONG_S).status_code for answer in answers} == {200}
            assert api.client.get("/readyz").status_code == 200


def test_a_server_that_hangs_does_not_stop_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres_server() as server, running_api(tmp_path, database_url=server.url) as api:
        path, unavailable = job_path(api), ProblemType.UNAVAILABLE.uri
        assert api.get(path).status_code == 200
        assert api.client.get("/readyz").status_code == 200
        monkeypatch.setattr(health, "ANSWER_S", 0.5)
        monkeypatch.setattr(health, "EVERY_S", 0.0)
        with ThreadPoolExecutor(2 * READS) as pool:
            with stopped(server):
                answers = [pool.submit(api.get, path) for _ in range(READS)]
                assert api.client.get("/livez").status_code == 200
                checks = [pool.submit(api.client.get, "/readyz") for _ in range(READS)]
                assert {check.result(LONG_S).json()["type"] for check in checks} == {unavailable}
                threads = threading.active_count()
                assert api.client.get("/readyz").json()["type"] == unavailable
                assert threading.active_count() <= threads, "expected all to wait for one check"
            assert {answer.result(LONG_S).status_code for answer in answers} == {200}
        monkeypatch.setattr(health, "ANSWER_S", LONG_S)
        assert api.client.get("/readyz").status_code == 200
        with psycopg.connect(server.url.replace("+psycopg", "")) as other:
            other.execute("UPDATE operator_tokens SET last_used_at = NULL")
            other.commit()
            other.execute("SELECT 1 FROM operator_tokens FOR UPDATE")
            assert api.get(path).status_code == 200, "expected no wait for the note that a caller was seen"
        server.crash()
        assert api.get(path).status_code == 200, "expected a new connection in place of the broken one"


def job_path(api: Api) -> str:
    """Return the path of an existing job."""
    api.package()
    return f"/v1/jobs/{api.get('/v1/jobs').json()['items'][0]['id']}"


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Stop the processes of a database server. The system keeps its connections open, but nothing answers."""
    processes = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


def test_a_locked_table_holds_up_no_other_request(tmp_path: Path) -> None:
    """More requests than threads wait for one lock. Each gives up within a bound."""
    with postgres_server() as server, running_api(tmp_path, database_url=server.url) as api:
        with psycopg.connect(server.url.replace("+psycopg", "")) as other:
            other.execute("LOCK TABLE models IN ACCESS EXCLUSIVE MODE")
            with ThreadPoolExecutor(THREADS + 5) as pool:
                blocked = [pool.submit(api.get, "/v1/models") for _ in range(THREADS + 5)]
                assert api.client.get("/livez").status_code == 200
                assert api.get("/v1/jobs").status_code == 200
                assert api.client.get("/readyz").status_code == 200
                answers = {answer.result(LONG_S).status_code for answer in blocked}
            assert answers == {503}
        assert api.get("/v1/models").status_code == 200


@pytest.mark.slow
def test_a_database_that_falls_silent_is_a_503_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "REQUESTS", Patience(lock_s=0.5, answer_s=1.0))
    monkeypatch.setattr(database, "CONNECT_S", 2)
    with postgres_server() as server, running_api(tmp_path, database_url=server.url) as api:
        assert api.get("/v1/jobs").status_code == 200
        with stopped(server):
            assert api.get("/v1/jobs").json()["type"] == ProblemType.UNAVAILABLE.uri
        assert api.get("/v1/jobs").status_code == 200
