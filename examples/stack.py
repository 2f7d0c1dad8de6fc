"""PostgreSQL and Redis for the demo: `make demo STACK=full`.

    with full_stack() as settings:
        ...                    # start the service with these settings
        messages(settings[BROKER])    # the number of messages that Celery has sent so far

Both run as processes of this user on free ports of loopback, and end with the block. Their data lie in a
temporary folder. PostgreSQL refuses to run as root, so root starts it as the user `nobody`.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from permille_service.cli.up import end_with_parent

START_S = 60.0
BROKER = "PERMILLE_BROKER_URL"


class StackError(Exception):
    """A program of the stack is not installed, or did not start."""


@contextmanager
def full_stack() -> Iterator[dict[str, str]]:
    """Run both servers for the block, and yield the settings of the service that name them.

    Raises:
        StackError: PostgreSQL or Redis is not installed, or did not start.
    """
    user = "nobody" if os.geteuid() == 0 else None
    initdb, postgres, redis = (_program(name) for name in ("initdb", "postgres", "redis-server"))
    with tempfile.TemporaryDirectory(prefix="permille-stack-") as name:
        folder = Path(name)
        if user:
            shutil.chown(folder, user)
        data = str(folder / "data")
        made = [initdb, "--pgdata", data, "--username", "permille", "--auth", "trust"]
        made += ["--encoding", "UTF8", "--locale", "C"]  # otherwise as in the environment
        subprocess.run(made, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        ports = _free_port(), _free_port()
        started = [
            _start([postgres, "-D", data, "-p", str(ports[0]), "-h", "127.0.0.1", "-k", name], user, folder),
            # The messages hold ids of jobs only, so Redis need not keep them.
            _start([redis, "--port", str(ports[1]), "--bind", "127.0.0.1", "--save", ""], user, folder),
        ]
        try:
            for port in ports:
                _wait_for(port)
            yield {
                "PERMILLE_DATABASE_URL": f"postgresql+psycopg://permille@127.0.0.1:{ports[0]}/postgres",
                BROKER: f"redis://127.0.0.1:{ports[1]}/0",
            }
        finally:
            for process in started:
                # PostgreSQL waits for open connections after SIGTERM, but not after SIGINT.
                process.send_signal(signal.SIGINT)
            for process in started:
                process.wait()


def messages(broker_url: str) -> int:
    """Return how many messages Celery has sent through Redis.

    Raises:
        StackError: no message went through Redis.
    """
    import redis  # the full stack needs the extra `celery`

    with redis.Redis.from_url(broker_url) as client:
        found = client.info("commandstats").get("cmdstat_lpush", {}).get("calls", 0)
    if not found:
        raise StackError("No job went through Redis.")
    return int(found)


def _program(name: str) -> str:
    """Find a program on the path, or in the folder where Debian puts PostgreSQL's."""
    debian = (str(folder) for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(debian))
    if found is None:
        raise StackError(f"The full stack needs {name}: sudo apt-get install redis-server postgresql")
    return found


def _start(command: Sequence[str], user: str | None, folder: Path) -> "subprocess.Popen[bytes]":
    # A session of its own, so that Ctrl-C reaches the demo alone, which then stops all in order. If the demo
    # is killed, its servers end, too.
    return subprocess.Popen(
        command,
        user=user,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent if sys.platform == "linux" else None,
    )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise StackError(f"No server answers on port {port}.") from None
            time.sleep(0.1)
