"""`permille up`: the API and a local worker as two processes, until SIGINT or SIGTERM; both are stopped
cleanly."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx

from permille_service.cli.exits import CommandError, Exit
from permille_service.settings import Settings, local_url

START_S = 60.0
STOP_S = 30.0
POLL_S = 0.1
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What is up, and where."""

    url: str
    token_path: Path
    processes: tuple[subprocess.Popen[bytes], ...]


@contextmanager
def running(settings: Settings, *, with_worker: bool) -> Iterator[Running]:
    """Start API and worker, yield once the API answers, stop both at the end.

    Raises:
        CommandError: a process ended early, or the API did not answer in time.
    """
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    url_path = settings.data_dir / "service.url"
    url_path.unlink(missing_ok=True)
    environment = environment_of(settings)
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(_start("permille_service", environment))
        url = _wait_for_url(url_path, started)
        _wait_for_health(settings, local_url(settings, port_of(url)), started)
        if with_worker:
            started.append(_start("permille_workers", environment))
        yield Running(url=url, token_path=settings.token_path, processes=tuple(started))
    finally:
        stop(started)
        url_path.unlink(missing_ok=True)


def port_of(url: str) -> int:
    """The port that a service's URL ends with."""
    return int(url.rpartition(":")[2])


def wait(up: Running) -> int:
    """Wait for SIGINT or SIGTERM (0), or for a process that ends by itself (its code, or 1)."""
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not asked:
            for process in up.processes:
                if process.poll() is not None:
                    return process.returncode or 1
            time.sleep(POLL_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ask all to end, the worker first; kill what does not within its time."""
    for process in reversed(processes):
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment of both processes: the caller's, and every setting."""
    values: Mapping[str, object] = {
        **settings.model_dump(exclude_none=True, exclude={"database_url", "broker_url", "allowed_hosts"}),
        "database_url": settings.database_url.get_secret_value(),
    }
    environment = dict(os.environ)
    environment.update({f"PERMILLE_{name.upper()}": str(value) for name, value in values.items()})
    if settings.broker_url is not None:
        environment["PERMILLE_BROKER_URL"] = settings.broker_url.get_secret_value()
    if settings.allowed_hosts:
        hosts = ",".join(f'"{host}"' for host in settings.allowed_hosts)
        environment["PERMILLE_ALLOWED_HOSTS"] = f"[{hosts}]"
    return environment


def _start(module: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # Its own session: Ctrl-C in the terminal reaches `permille up` alone, which then stops the others in
    # order.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    """In the child: ask Linux for a SIGTERM when `permille up` itself is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_for_url(path: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    for _ in _until_deadline(processes):
        if path.exists() and (url := path.read_text(encoding="ascii").strip()):
            return url
    raise CommandError(f"expected the API to listen within {START_S:.0f} s, got nothing", Exit.RETRY)


def _wait_for_health(settings: Settings, url: str, processes: list[subprocess.Popen[bytes]]) -> None:
    verify = str(settings.tls_certificate) if settings.tls_certificate else True
    for _ in _until_deadline(processes):
        try:
            httpx.get(f"{url}/v1/health", verify=verify, trust_env=False, timeout=5.0)
            return
        except httpx.ConnectError as exc:
            if settings.tls_certificate and "CERTIFICATE" in str(exc).upper():
                return  # it answers; whether its certificate names this address is for its clients to say
        except httpx.TransportError:
            continue
    raise CommandError(f"expected the API to answer within {START_S:.0f} s, got nothing", Exit.RETRY)


def _until_deadline(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for process in processes:
            if process.poll() is not None:
                raise CommandError(
                    f"expected the service to run, got exit code {process.returncode} (see above)",
                    Exit.FAILED,
                )
        yield
        time.sleep(POLL_S)
