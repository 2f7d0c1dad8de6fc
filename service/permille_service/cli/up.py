"""`permille up`: run the API and a local worker as two processes until SIGINT or SIGTERM.

If one of the two ends by itself, it is started again. At the end, both are stopped cleanly. We do not use
circus or supervisord, because they need a daemon and a configuration.
"""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from filelock import FileLock, Timeout
from pydantic import SecretStr

from permille.errors import OperatorError
from permille.exits import CommandError, Exit
from permille.files import make_private, write_atomic
from permille_service.settings import Settings, local_url

START_S = 300.0  # an end of the process is noticed at once, so only a slow machine waits
STOP_S = 30.0
POLL_S = 0.1
STEADY_S = 60.0
"""If a process ran longer than this before it ended, its earlier exits no longer count."""
DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Delay before the first restart of a process, before the second, and so on.

If the process ends again after the last restart, `permille up` gives up.
"""
WRONG_SETTINGS = 2
"""Exit code of an API or worker whose settings are wrong. A restart would not help."""
PR_SET_PDEATHSIG = 1

logger = logging.getLogger("permille.up")


@dataclass(slots=True, kw_only=True)
class Supervised:
    """A process that is started again when it ends by itself."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    delays_s: Sequence[float] = DELAYS_S
    process: subprocess.Popen[bytes] = field(init=False)
    _started_at: float = field(init=False, default=0.0)
    _start_at: float | None = field(init=False, default=None)
    _ends: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._start()

    def look_after(self) -> None:
        """Start the process again if it has ended and its delay is over.

        Raises:
            CommandError: the process ended too often, or its settings are wrong.
        """
        now = time.monotonic()
        if self._start_at is not None:
            if now >= self._start_at:
                self._start()
            return
        code = self.process.poll()
        if code is None:
            return
        if now - self._started_at > STEADY_S:
            self._ends = 0
        self._ends += 1
        if code == WRONG_SETTINGS or self._ends > len(self.delays_s):
            times = f" {self._ends} times within {STEADY_S:.0f} s of its start" if self._ends > 1 else ""
            raise CommandError(
                f"The {self.name} ended{times} with {_how(code)}; see its messages above.",
                Exit.FAILED,
            )
        delay_s = self.delays_s[self._ends - 1]
        logger.warning("the %s ended with %s: starting it again in %g s", self.name, _how(code), delay_s)
        self._start_at = now + delay_s

    def _start(self) -> None:
        self.process, self._started_at, self._start_at = self.start(), time.monotonic(), None


def run(
    settings: Settings, *, with_worker: bool, port_file: Path | None, announce: Callable[[str], None]
) -> None:
    """Start API and worker, keep them running until SIGINT or SIGTERM, then stop them.

    Args:
        announce: a function that is called with the URL once the API answers.
        port_file: a file that gets the port after `announce` was called. None: no such file.

    Raises:
        CommandError: the service of this data folder is already running, the API did not answer in time, or
            a process ended too often.
    """
    try:
        make_private(settings.data_dir)
    except OperatorError as exc:
        raise CommandError(str(exc), Exit.FAILED) from exc
    with _only_one(settings.data_dir):
        url_path = settings.data_dir / "service.url"
        for stale in (url_path, port_file):  # files of an earlier run, which a waiting program must not read
            if stale is not None:
                stale.unlink(missing_ok=True)
        environment = environment_of(settings)
        started: list[Supervised] = []
        try:
            started.append(Supervised(name="API", start=lambda: _start("permille_service", environment)))
            url = _wait_for_url(url_path, started[0])
            port = int(url.rpartition(":")[2])
            _wait_for_health(settings, local_url(settings, port), started[0])
            environment["PERMILLE_PORT"] = str(port)  # if the API is restarted, it gets the same port again
            if with_worker:
                started.append(
                    Supervised(name="worker", start=lambda: _start("permille_workers", environment))
                )
            with _asked_to_end() as asked:
                # Announce the URL before the port file is written. A program that waits for this file prints
                # lines as soon as it appears, and they would mix with ours.
                announce(url)
                if port_file is not None:
                    write_atomic(port_file, f"{port}\n".encode())
                while not asked:
                    for supervised in started:
                        supervised.look_after()
                    time.sleep(POLL_S)
        finally:
            stop([one.process for one in started], STOP_S)
            url_path.unlink(missing_ok=True)


@contextmanager
def _only_one(data_dir: Path) -> Iterator[None]:
    lock = FileLock(data_dir / "up.lock", timeout=0, mode=0o600, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as exc:
        url = data_dir / "service.url"
        where = (
            f"at {url.read_text(encoding='ascii').strip()}" if url.exists() else "and is starting or stopping"
        )
        raise CommandError(f"the service of {data_dir} is already running {where}", Exit.RETRY) from exc
    except OSError as exc:
        raise CommandError(f"{data_dir} cannot be written: {exc.strerror}", Exit.FAILED) from exc
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """Catch SIGINT and SIGTERM, and yield the list of the signals that have come."""
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop(
    processes: Sequence[subprocess.Popen[Any]], within_s: float, number: signal.Signals = signal.SIGTERM
) -> None:
    """Send a signal to the processes, the last one first. Kill those that still run after `within_s`."""
    for process in reversed(processes):
        if process.poll() is None:
            process.send_signal(number)
    deadline = time.monotonic() + within_s
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment_of(settings: Settings) -> dict[str, str]:
    """Return the environment of both processes: the caller's variables, and one variable for each setting."""
    environment = dict(os.environ)
    for name, value in settings.model_dump(exclude_none=True).items():
        plain = value.get_secret_value() if isinstance(value, SecretStr) else value
        text = json.dumps(plain) if isinstance(plain, tuple) else str(plain)
        environment[f"PERMILLE_{name.upper()}"] = text
    return environment


def _start(module: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # Start the process in a session of its own. Ctrl-C in the terminal then reaches only `permille up`, which
    # stops the processes in order.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent if sys.platform == "linux" else None,
    )


def end_with_parent() -> None:
    """Ask Linux to send this process SIGTERM when `permille up` is killed. Runs in the child process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _wait_for_url(path: Path, api: Supervised) -> str:
    for _ in _until_deadline(api):
        if path.exists() and (url := path.read_text(encoding="ascii").strip()):
            return url
    raise CommandError(f"The API does not listen after {START_S:.0f} s. Try again.", Exit.RETRY)


def _wait_for_health(settings: Settings, url: str, api: Supervised) -> None:
    verify = str(settings.tls_certificate) if settings.tls_certificate else True
    for _ in _until_deadline(api):
        try:
            httpx.get(f"{url}/v1/health", verify=verify, trust_env=False, timeout=5.0)
            return
        except httpx.ConnectError as exc:
            if settings.tls_certificate and "CERTIFICATE" in str(exc).upper():
                return  # The API answers. Whether clients can verify its certificate does not matter here.
        except httpx.TransportError:
            continue
    raise CommandError(f"The API does not answer after {START_S:.0f} s. Try again.", Exit.RETRY)


def _until_deadline(api: Supervised) -> Iterator[None]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (code := api.process.poll()) is not None:
            raise CommandError(
                f"The API did not start: it ended with {_how(code)}; see its messages above.", Exit.FAILED
            )
        yield
        time.sleep(POLL_S)
