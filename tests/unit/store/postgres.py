"""A private PostgreSQL server for tests, where its programs are installed; or one that the environment names.

PERMILLE_TEST_POSTGRES names a database that the tests may empty: `postgresql+psycopg://user@host/name`.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAMED_URL = os.environ.get("PERMILLE_TEST_POSTGRES")
PROGRAMS = ("initdb", "postgres")
AVAILABLE = NAMED_URL is not None or all(shutil.which(program) for program in PROGRAMS)
_TIMEOUT_S = 60.0


@contextmanager
def postgres_url() -> Iterator[str]:
    """The URL of an empty or emptiable database, as long as the block lasts."""
    if NAMED_URL is not None:
        yield NAMED_URL
        return
    with tempfile.TemporaryDirectory(prefix="permille-postgres-") as name:
        folder = Path(name)
        user = _server_user(folder)
        data = folder / "data"
        subprocess.run(
            ["initdb", "--pgdata", data, "--username", "permille", "--auth", "trust", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            user=user,
            cwd=folder,
        )
        port = _free_port()
        options = ["-p", str(port), "-h", "127.0.0.1", "-k", str(folder), "-c", "fsync=off"]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                ["postgres", "-D", data, *options], user=user, cwd=folder, stdout=log, stderr=log
            )
        try:
            _wait_for(port, folder / "log")
            yield f"postgresql+psycopg://permille@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            server.wait(_TIMEOUT_S)


def _server_user(folder: Path) -> str | None:
    """PostgreSQL refuses to run as root: then it runs as nobody, to whom the folder goes."""
    if os.geteuid() != 0:
        return None
    shutil.chown(folder, "nobody")
    return "nobody"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected PostgreSQL on port {port}: {log.read_text()[-2000:]}") from exc
            time.sleep(0.1)
