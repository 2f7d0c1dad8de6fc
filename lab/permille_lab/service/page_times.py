"""Measure the response times of the web interface and of the API's fleet routes on a large fleet.

    python -m permille_lab.service.page_times --devices 10000 --runs 100000 --database postgresql

Each line shows the median and the 95th percentile of the wall-clock time of a response. It also shows the
mean processor time of service and database for a response, which other load on the machine disturbs less.
There are as many jobs as runs.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from sqlalchemy import insert

from permille.store.database import Database, now
from permille.store.ids import Prefix, new_id
from permille.store.tables import Job
from tests.console.page_site import site, views
from tests.unit.store.postgres import postgres_server

ROUTES = ("/v1/fleet", "/v1/releases/notes/comparison", "/v1/runs", "/v1/jobs?state=failed")
MORE = (
    "/ui/jobs?state=failed",
    "/ui/jobs?state=running",
    "/ui/jobs?release=notes",
    "/ui/jobs?model_id=model_none",
)
TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        _database(asked.database) as (url, servers),
        site(Path(folder), url=url, devices=asked.devices, runs=asked.runs) as (running, stocked),
    ):
        _add_jobs(stocked.database, stocked.held.tenant_id, asked.runs)
        with running.client() as client:
            client.post(
                "/ui/sign-in", data={"token": running.token}, headers={"Sec-Fetch-Site": "same-origin"}
            )
            for path in (*ROUTES, *views(stocked).values(), *MORE):
                print(_line([running.process.pid, *servers], client, path, asked.times), flush=True)


@contextmanager
def _database(name: str) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """Yield the URL of a database (None for the service's file) and the process of its server."""
    if name == "sqlite":
        yield None, ()
        return
    with postgres_server() as server:
        yield server.url, (server.pid,)


def _line(parents: Sequence[int], client: httpx.Client, path: str, times: int) -> str:
    took, before = [], _processor_s(parents)
    for _ in range(times):
        begun = time.perf_counter()
        answer = client.get(path)
        took.append(time.perf_counter() - begun)
        assert answer.status_code == 200, (path, answer.status_code)
    own = (_processor_s(parents) - before) / times
    high = statistics.quantiles(took, n=20)[-1]
    seconds = f"p50 {statistics.median(took):.3f} s  p95 {high:.3f} s  processor {own:.3f} s"
    return f"{path[:40]:40} {seconds}  {len(answer.content)} bytes"


def _processor_s(parents: Sequence[int]) -> float:
    """Return the processor seconds so far of all children of these processes, such as connections."""
    below = (Path(f"/proc/{one}/task/{one}/children").read_text().split() for one in parents)
    stats = (Path(f"/proc/{child}/stat").read_text() for children in below for child in children)
    fields = (stat.rpartition(")")[2].split() for stat in stats)
    return sum(int(found[11]) + int(found[12]) for found in fields) / TICK


def _add_jobs(database: Database, tenant_id: str, count: int) -> None:
    """Add finished replay jobs, such as shared logs create."""
    with database.write() as session:
        at = now(session)
        session.execute(
            insert(Job),
            [
                {
                    "id": new_id(Prefix.JOB),
                    "tenant_id": tenant_id,
                    "kind": "replay",
                    "state": "succeeded",
                    "payload": {"run_id": "r"},
                    "request_digest": "",
                    "progress": 1.0,
                    "attempt": 1,
                    "max_attempts": 3,
                    "fence": 1,
                    "event_seq": 0,
                    "available_at": at,
                    "created_at": at,
                    "updated_at": at,
                }
                for _ in range(count)
            ],
        )


if __name__ == "__main__":
    main()
