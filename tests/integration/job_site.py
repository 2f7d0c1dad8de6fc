"""A site for jobs in tests: a database, blobs, worker processes, and optionally a Redis server."""

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from permille.schemas.jobs import ENDED
from permille.store import access, rows
from permille.store.database import Database
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from permille.store.migrations.schema import migrate
from permille.store.tables import Artifact, Job
from tests.ports import free_port
from tests.preloaded import Process

TIMEOUT_S = 240.0


@dataclass(kw_only=True)
class Site:
    """Everything that a test of workers needs, below one folder."""

    root: Path
    db: Database
    tenant_id: str
    broker_url: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """Return the environment of workers with their settings."""
        values = {
            "DATABASE_URL": self.db.url,
            "BLOB_ROOT": str(self.root / "blobs"),
            "MODEL_ROOT": str(self.root / "models"),
            "CORPUS_ROOT": str(self.root / "corpora"),
            "TENANT_ROOT": str(self.root / "tenants"),
            "WORK_ROOT": str(self.root / "work"),
            "LEASE_S": "30",
            "POLL_S": "0.05",
            "SWEEP_S": "0.2",
            "DRAIN_S": "5",
            **({"BROKER_URL": self.broker_url} if self.broker_url else {}),
            **self.settings,
        }
        return {**os.environ, **{f"PERMILLE_{name}": value for name, value in values.items()}}

    def start_worker(self, *, real: bool = False) -> "subprocess.Popen[bytes]":
        """Start a worker process with scripted or real tasks. With a broker, it is a Celery worker."""
        module = ["permille_workers"] if real else ["tests.integration.job_tasks", "worker"]
        command = [sys.executable, "-m", *module]
        with (self.root / "worker.log").open("ab") as log:
            process = Process(command, env=self.environment(), stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def submit(self, *, kind: str = "mask", steps: int = 1, step_s: float = 0.0, **payload: Any) -> Job:
        """Queue a job of `job_tasks`."""
        max_attempts = payload.pop("max_attempts", 3)
        content = {"steps": steps, "step_s": step_s, "trace": str(self.trace), **payload}
        with self.db.write() as session:
            return queue.submit(
                session,
                NewJob(tenant_id=self.tenant_id, kind=kind, payload=content, max_attempts=max_attempts),
            )

    def read(self, job: Job) -> Job:
        """Return the current row of the job."""
        with self.db.read() as session:
            return rows.get(session, Job, tenant_id=self.tenant_id, row_id=job.id)

    def cancel(self, job: Job) -> None:
        """Request the cancellation of the job."""
        with self.db.write() as session:
            queue.request_cancel(session, tenant_id=self.tenant_id, job_id=job.id)

    def results(self) -> list[Artifact]:
        """Return the results that the jobs have published."""
        with self.db.read() as session:
            return list(session.query(Artifact).order_by(Artifact.id))

    @property
    def trace(self) -> Path:
        """The file to which attempts append their lines."""
        return self.root / "trace"

    def attempts(self) -> list[list[str]]:
        """Return the lines of the attempts: job id, attempt, fence, process id."""
        return [line.split() for line in self.trace.read_text().splitlines()] if self.trace.exists() else []

    def wait_for_state(self, job: Job, *states: str) -> Job:
        """Wait until the job is in one of the states.

        Raises:
            AssertionError: The job has ended in another state.
        """
        wait_until(lambda: self.read(job).state in {*states, *ENDED}, self.explain)
        found = self.read(job)
        if found.state not in states:
            raise AssertionError(f"expected {states}, got {found.state}: {found.error}; {self.explain()}")
        return found

    def wait_for_attempts(self, count: int) -> list[list[str]]:
        """Wait until `count` attempts have begun."""
        wait_until(lambda: len(self.attempts()) >= count, self.explain)
        return self.attempts()

    def stall(self, worker: "subprocess.Popen[bytes]", child: int) -> None:
        """Stop a worker and its child at a moment when neither holds the database's write lock."""
        wait_until(lambda: stopped_unlocked(self.root / "permille.db", worker.pid, child), self.explain)

    def wake(self, worker: "subprocess.Popen[bytes]", child: int) -> None:
        """Let both continue."""
        os.kill(child, signal.SIGCONT)
        worker.send_signal(signal.SIGCONT)

    def explain(self) -> str:
        """Return the end of the workers' log, for the message of a failed wait."""
        log = self.root / "worker.log"
        return log.read_text(errors="replace")[-6000:] if log.exists() else "no worker was started"


@contextmanager
def job_site(root: Path, *, broker_url: str | None = None, database_url: str | None = None) -> Iterator[Site]:
    """Make a site, by default on SQLite. Its workers are killed at the end."""
    url = database_url or f"sqlite:///{root}/permille.db"
    migrate(url)
    db = Database(url)
    with db.write() as session:
        tenant_id = access.create_tenant(session, name="acme").id
    site = Site(root=root, db=db, tenant_id=tenant_id, broker_url=broker_url)
    try:
        yield site
    finally:
        for process in site.processes:
            process.kill()
            process.wait()
        db.close()


def wait_until(condition: Callable[[], bool], explain: Callable[[], str]) -> None:
    """Poll until the condition holds. After a long time, raise an error with an explanation."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected it to happen within {TIMEOUT_S} s; {explain()}")
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Return True if the process runs. A zombie does not."""
    return _state(pid) not in {"Z", ""}


def stopped_unlocked(database: Path, *pids: int) -> bool:
    """Stop processes by SIGSTOP. Return True if they stopped outside a write transaction of SQLite.

    Otherwise they continue, and the caller tries again. A process that is stopped inside a write transaction
    would block all other writers.
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: {_state(pid) for pid in pids} == {"T"}, lambda: "a process does not stop")
    with closing(sqlite3.connect(database, timeout=0.5, isolation_level=None)) as probe:
        try:
            probe.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            return False
        probe.execute("ROLLBACK")
        return True


def _state(pid: int) -> str:
    """Return the state letter of proc(5), such as `T` for a stopped process, or "" without a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@dataclass
class Redis:
    """A Redis server that keeps its data in memory, so that a kill loses them."""

    port: int
    folder: Path
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        """The URL of the broker."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        binary = shutil.which("redis-server")
        if binary is None:
            raise RuntimeError("expected redis-server on the PATH: apt-get install redis-server")
        command = [
            binary,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self.process = subprocess.Popen(
            [*command, "--dir", str(self.folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._answers, lambda: "redis-server does not answer")

    def kill(self) -> None:
        """Kill the server by SIGKILL."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def hang(self) -> None:
        """Stop the server by SIGSTOP. The system still accepts connections, but nothing answers."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a server go on that `hang` stopped."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def redis_server(folder: Path) -> Iterator[Redis]:
    """Run a Redis server on a free port of loopback."""
    server = Redis(port=free_port(), folder=folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
