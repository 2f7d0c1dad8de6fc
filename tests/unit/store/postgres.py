"""A PostgreSQL server for tests: a private one, or the one in the environment.

PERMILLE_TEST_POSTGRES names a database that the tests may empty: `postgresql+psycopg://user@host/name`.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.ports import free_port

NAMED_URL = os.environ.get("PERMILLE_TEST_POSTGRES")
_TIMEOUT_S = 60.0


class Server:
    """A server in its own folder. Tests can crash it and start it again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._user, self._port = folder, _server_user(folder), free_port()
        self.url = f"postgresql+psycopg://permille@127.0.0.1:{self._port}/postgres"
        if not (folder / "data").exists():
            subprocess.run(
                [
                    _program("initdb"),
                    "--pgdata",
                    folder / "data",
                    "--username",
                    "permille",
                    "--auth",
                    "trust",
                    "--encoding",
                    "UTF8",
                    "--locale",
                    "C",
                    "--no-sync",
                ],
                check=True,
                stdout=subprocess.DEVNULL,
                user=self._user,
                cwd=folder,
            )
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Process id of the server. Its connections are child processes."""
        return self._process.pid

    def crash(self) -> None:
        """Cut all connections at once, and restart the server. It recovers from its log."""
        # PostgreSQL's immediate shutdown: no checkpoint, so the restart must recover.
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(_TIMEOUT_S)
        self._process = self._start()

    def stop(self) -> None:
        # PostgreSQL's fast shutdown. After SIGTERM, it would wait for connections that a client left open.
        self._process.send_signal(signal.SIGINT)
        self._process.wait(_TIMEOUT_S)

    def _start(self) -> "subprocess.Popen[bytes]":
        # Tests do not need durability after a crash of the machine, so fsync is off.
        options = ["-p", str(self._port), "-h", "127.0.0.1", "-k", str(self._folder), "-c", "fsync=off"]
        with (self._folder / "log").open("ab") as log:
            server = subprocess.Popen(
                [_program("postgres"), "-D", self._folder / "data", *options],
                user=self._user,
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        _wait_for(self._port, self._folder / "log")
        return server


@contextmanager
def postgres_server() -> Iterator[Server]:
    """Yield a private server for the duration of the block."""
    with tempfile.TemporaryDirectory(prefix="permille-postgres-") as name:
        server = Server(Path(name))
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def postgres_url() -> Iterator[str]:
    """Yield the URL of a database that is empty or may be emptied."""
    if NAMED_URL is not None:
        yield NAMED_URL
        return
    with postgres_server() as server:
        yield server.url


def _program(name: str) -> str:
    """Find one of the server's programs on the path or in Debian's folder."""
    debian = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), key=lambda path: (len(path), path))
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(reversed(debian)))
    assert found is not None, f"expected PostgreSQL's {name}: scripts/system-packages.sh installs it"
    return found


def _server_user(folder: Path) -> str | None:
    """Return the user of the server: None for the current one.

    PostgreSQL refuses to run as root. Then its user is nobody, who becomes the owner of the folder.
    """
    if os.geteuid() != 0:
        return None
    shutil.chown(folder, "nobody")
    return "nobody"


def _wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            psycopg.connect(host="127.0.0.1", port=port, user="permille", dbname="postgres").close()
            return
        except psycopg.OperationalError as exc:  # not started yet, or still in recovery
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected PostgreSQL on port {port}: {log.read_text()[-2000:]}") from exc
            time.sleep(0.1)


@contextmanager
def empty_database(name: str, folder: Path) -> Iterator[str]:
    """Yield the URL of an empty database for this run only. `name` is `sqlite` or `postgresql`."""
    if name == "postgresql":
        with postgres_url() as url:
            yield url
    else:
        (folder / "data").mkdir(mode=0o700)
        yield f"sqlite:///{folder}/data/permille.db"
