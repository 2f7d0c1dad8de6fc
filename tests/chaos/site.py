"""PostgreSQL, Redis, two API processes and three workers. A process that ends is started again."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import psycopg

from permille.package.blobs import BlobFolder
from permille.store.blobs.folder import open_blobs
from permille_workers.runtime.settings import WorkerSettings
from tests.bucket_site import Gate
from tests.chaos.bucket import kept_bucket, save
from tests.chaos.processes import API_STEPS, CHILD_STEPS, HARMED_AGENT, STORE_FAULTS, WORKER_STEPS
from tests.integration.job_site import Redis
from tests.ports import free_port
from tests.rounds.run import descendants
from tests.running_service import environment
from tests.unit.store.postgres import Server
from tests.worker_role import ROLE, make_role, with_role

APIS, WORKERS = 2, 3
LEASE_S: Final = 8.0
_STEPS = (*CHILD_STEPS, *WORKER_STEPS, *API_STEPS, *STORE_FAULTS)
_SKEWS_S = (-3600, 0, 3600)
_START_S = 180.0
_CACHE_BYTES = 1 << 20
"""Size of each machine's cache of a bucket. It is small, so that copies are evicted."""

Process = subprocess.Popen[bytes]


@dataclass(slots=True)
class Site:
    """All processes and files of a run, below one folder."""

    root: Path
    rng: random.Random
    postgres: Server
    redis: Redis
    warm: Process
    bucket: Gate | None
    processes: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    _open: ExitStack = field(default_factory=ExitStack)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)
    _keeper: threading.Thread | None = None

    @classmethod
    def open(cls, root: Path, seed: int, *, store: str) -> "Site":
        """Start everything below a folder. Data of an earlier run are kept."""
        stack = ExitStack()
        bucket = stack.enter_context(kept_bucket(root / "bucket")) if store == "bucket" else None
        for name in ("data", "postgres", *(f"tokens/{step}" for step in _STEPS)):
            (root / name).mkdir(parents=True, exist_ok=True)
        redis = Redis(port=free_port(), folder=root)
        redis.start()
        (root / "warm.sock").unlink(missing_ok=True)
        site = cls(
            root=root,
            rng=random.Random(f"site {seed}"),
            postgres=Server(root / "postgres"),
            redis=redis,
            warm=_start(root, "warm", ["warm", str(root / "warm.sock")], {"CHAOS_TOKENS": f"{root}/tokens"}),
            bucket=bucket,
            _open=stack,
        )
        _wait(lambda: (root / "warm.sock").exists(), "the warm process")
        make_role(site.postgres)
        # Start them one after the other: the first one makes the tables and the keys.
        for number in range(APIS):
            site._start_api(f"api-{number}")
            _wait(lambda: site.answers(site.ports[f"api-{number}"]), "the API")  # noqa: B023 - called now
        for number in range(WORKERS):
            site._start_worker(f"worker-{number}")
        site._keeper = threading.Thread(target=site._keep, daemon=True)
        site._keeper.start()
        return site

    @property
    def urls(self) -> list[str]:
        """Return the addresses of the APIs."""
        return [f"http://127.0.0.1:{port}" for port in self.ports.values()]

    @property
    def token(self) -> str:
        """Return the first administrator's token."""
        return (self.root / "data" / "operator.token").read_text().strip()

    def answers(self, port: int) -> bool:
        with suppress(httpx.TransportError):
            address = f"http://127.0.0.1:{port}/v1/health"
            return httpx.get(address, trust_env=False, timeout=5).status_code == 200
        return False

    def connect(self) -> "psycopg.Connection[tuple[str, ...]]":
        """Open a connection to the database. OperationalError is raised while the database is away."""
        return psycopg.connect(self.postgres.url.replace("+psycopg", ""), connect_timeout=5)

    def token_for(self, step: str, name: str) -> None:
        """Ask for one fault at a step."""
        (self.root / "tokens" / step / name).touch()

    def tokens_left(self) -> list[str]:
        """Return the steps whose faults have not been reached yet."""
        return sorted(path.parent.name for path in (self.root / "tokens").glob("*/*"))

    def heal(self) -> None:
        """Ask for no more faults."""
        if self.bucket is not None:
            self.bucket.faults.clear()
        for path in (self.root / "tokens").glob("*/*"):
            path.unlink(missing_ok=True)

    def pick(self, kind: str) -> tuple[str, Process]:
        """Return the name of a random process of a kind, and the process."""
        with self._lock:
            name = self.rng.choice(sorted(name for name in self.processes if name.startswith(kind)))
            return name, self.processes[name]

    def database_processes(self) -> set[int]:
        return descendants(self.postgres.pid)

    def settings(self) -> WorkerSettings:
        """Return the settings of a worker that collects all blobs without a row."""
        values = {name.removeprefix("PERMILLE_").lower(): value for name, value in self._settings().items()}
        return WorkerSettings.model_validate(values)

    def blobs(self) -> BlobFolder:
        """Return the store as the product opens it."""
        return open_blobs(self.settings())

    def files(self) -> Path:
        """Return the store as files: its folder, or a copy of the bucket."""
        if self.bucket is None:
            return self.root / "data" / "blobs"
        return save(self.bucket, self.root / "bucket")

    def quiet(self) -> None:
        """End the product's processes. The database and the broker go on."""
        self._closing.set()
        if self._keeper is not None:
            self._keeper.join()
        for process in (*self.processes.values(), self.warm):
            _signal(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """End everything. The files below the folder and the objects of the bucket are kept."""
        self.quiet()
        self._open.close()
        self.redis.kill()
        self.postgres.stop()

    def _start_api(self, name: str) -> None:
        self.ports[name] = free_port()
        own = {"PERMILLE_PORT": str(self.ports[name]), "PERMILLE_WORKER_ROLE": ROLE, **HARMED_AGENT}
        self.processes[name] = _start(self.root, name, ["api"], {**self._settings(), **own})

    def _start_worker(self, name: str) -> None:
        own = {"CHAOS_SKEW_S": str(self.rng.choice(_SKEWS_S))}
        own["PERMILLE_DATABASE_URL"] = with_role(self.postgres)
        own |= {"CHAOS_COLD": "1"} if name == f"worker-{WORKERS - 1}" else HARMED_AGENT
        self.processes[name] = _start(self.root, name, ["worker"], {**self._settings(), **own})

    def _settings(self) -> dict[str, str]:
        data = self.root / "data"
        plain = {
            "DATA_DIR": str(data),
            "DATABASE_URL": self.postgres.url,
            "BROKER_URL": self.redis.url,
            "LEASE_S": str(LEASE_S),
            "POLL_S": "0.1",
            "SWEEP_S": "1",
            "DRAIN_S": "2",
            "COLLECT_EVERY_S": "5",
            "COLLECTION_GRACE_S": "0",
            "THREADS": "1",
            "FISHER_SPLIT_FLOPS": "0",
            "RUNS_PER_DEVICE_DAY": "10000",
            "UPLOADS_PER_DEVICE_DAY": "10000",
            "SIGN_INS_PER_MINUTE": "10000",
        }
        if self.bucket is not None:
            plain |= {"BLOB_BUCKET": self.bucket.address, "BLOB_CACHE_BYTES": str(_CACHE_BYTES)}
        settings = {f"PERMILLE_{name}": value for name, value in plain.items()}
        return {
            **settings,
            "CHAOS_TOKENS": str(self.root / "tokens"),
            "CHAOS_WARM": str(self.root / "warm.sock"),
        }

    def _keep(self) -> None:
        """Restart processes that have ended, after a moment, as a service manager does."""
        while not self._closing.wait(0.3):
            with self._lock:
                for name, process in list(self.processes.items()):
                    if process.poll() is None:
                        continue
                    self.restarts += 1
                    (self._start_api if name.startswith("api") else self._start_worker)(name)


def _start(root: Path, name: str, arguments: list[str], settings: dict[str, str]) -> Process:
    with (root / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.processes", *arguments],
            env=environment(**settings),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def send(pids: set[int], number: signal.Signals) -> None:
    """Send a signal to those of the processes that still exist."""
    for pid in pids:
        _signal(pid, number)


def flush(redis: Redis) -> None:
    """Delete everything in the broker."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", redis.port), timeout=5) as connection:
        connection.sendall(b"FLUSHALL\r\n")
        connection.recv(16)


def _wait(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"expected {what} within {_START_S:.0f} s")
        time.sleep(0.2)
