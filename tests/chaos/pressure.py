"""Much hangs at once for a minute: `python -m tests.chaos.pressure --seconds 60`.

The service is a real process with PostgreSQL, Redis and a worker. Another session locks the table of models,
and Redis is stopped by SIGSTOP. One tenant holds sixty requests open: 45 wait for the lock, more than there
are threads, and the others send their bodies byte by byte. Meanwhile, another tenant reads. Each of its
requests must be answered within five seconds, by 200 or 503. Then everything is let go. The service must be
ready again by itself, and a job that was queued without Redis must succeed.
"""

import argparse
import json
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import psycopg

from tests.integration.job_site import Redis, redis_server
from tests.running_service import Running, running_service
from tests.tiny_model import write_model
from tests.unit.store.postgres import Server, postgres_server

WAITING, TRICKLING = 45, 15
ANSWER_S: Final = 5.0
RECOVERY_S: Final = 120.0
READS: Final = ("/v1/jobs", "/v1/corpora", "/v1/packages", "/v1/releases", "/v1/devices", "/readyz", "/livez")
_BODY: Final = json.dumps({"name": "slow", "source": {"kind": "folder", "path": "tiny"}}).encode()


@dataclass(slots=True)
class Answers:
    """The answers to one tenant's reads.

    Attributes:
        slow: Paths and seconds of the answers that took longer than `ANSWER_S`.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    longest_s: float = 0.0
    slow: list[str] = field(default_factory=list)

    def right(self) -> bool:
        """Return whether each read got an answer in time, and some got what they asked for."""
        return not self.slow and self.statuses[200] > 0 and not self.statuses.keys() - {200, 503}


def other_tenant(up: Running) -> str:
    """Make a tenant. Return a token of it."""
    with up.client() as client:
        tenant = client.post("/v1/tenants", json={"name": "other"}).json()["id"]
        body = {"name": "reader", "role": "viewer", "tenant_id": tenant}
        return str(client.post("/v1/tokens", json=body).json()["secret"])


def read(up: Running, token: str, end: threading.Event) -> Answers:
    """Read as a tenant until the end."""
    found = Answers()
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=up.url, headers=headers, timeout=60.0, trust_env=False) as client:
        while not end.is_set():
            for path in READS:
                begun = time.monotonic()
                try:
                    status = client.get(path).status_code
                except httpx.TransportError:
                    status = 0
                seconds = time.monotonic() - begun
                found.statuses[status] += 1
                found.longest_s = max(found.longest_s, seconds)
                if seconds > ANSWER_S:
                    found.slow.append(f"{path} {seconds:.1f} s")
            end.wait(0.2)
    return found


def wait_for_the_lock(up: Running, end: threading.Event) -> None:
    """Ask for the locked table again and again."""
    with up.client() as client:
        while not end.is_set():
            with suppress(httpx.TransportError):
                client.get("/v1/models")


def trickle(up: Running, end: threading.Event) -> None:
    """Send a request byte by byte. Begin again if the service closes the connection."""
    address = httpx.URL(up.url)
    head = (
        f"POST /v1/models HTTP/1.1\r\nHost: {address.host}\r\nAuthorization: Bearer {up.token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(_BODY)}\r\n\r\n"
    ).encode()
    while not end.is_set():
        with suppress(OSError), socket.create_connection((address.host, address.port or 80), 10) as slow:
            slow.sendall(head)
            for place in range(len(_BODY)):
                if end.wait(1.0):
                    return
                slow.sendall(_BODY[place : place + 1])


@contextmanager
def stopped(redis: Redis) -> Iterator[None]:
    """Stop Redis for the duration of the block."""
    redis.hang()
    try:
        yield
    finally:
        redis.go_on()


def press(up: Running, server: Server, seconds: float) -> Answers:
    """Lock the table of models and hold requests open for some seconds, and read meanwhile."""
    token, end = other_tenant(up), threading.Event()
    loads: list[Callable[[Running, threading.Event], None]] = []
    loads += [wait_for_the_lock] * WAITING + [trickle] * TRICKLING
    threads = [threading.Thread(target=load, args=(up, end), daemon=True) for load in loads]
    with psycopg.connect(server.url.replace("+psycopg", "")) as session:
        session.execute("LOCK TABLE models IN ACCESS EXCLUSIVE MODE")
        for thread in threads:
            thread.start()
        threading.Timer(seconds, end.set).start()
        found = read(up, token, end)
    for thread in threads:
        thread.join()
    return found


def recovered(up: Running, job: str) -> str:
    """Wait until the service is ready and the job has ended. Return the state of the job."""
    until, state = time.monotonic() + RECOVERY_S, "unknown"
    with up.client() as client:
        while time.monotonic() < until:
            with suppress(httpx.TransportError):
                ready = client.get("/readyz").status_code == client.get("/v1/models").status_code == 200
                state = client.get(f"/v1/jobs/{job}").json()["state"] if ready else "not ready"
                if state in ("succeeded", "failed", "dead"):
                    return state
            time.sleep(0.5)
    return state


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print one line, and return 0 if all went well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long everything hangs")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="permille-pressure-") as name:
        root = Path(name)
        write_model(root / "models" / "tiny")
        with postgres_server() as server, redis_server(root) as redis:
            urls = {"PERMILLE_DATABASE_URL": server.url, "PERMILLE_BROKER_URL": redis.url}
            with running_service(root, "--model-root", str(root / "models"), **urls) as up:
                up.answer("models", "add", "tiny", "--folder", "tiny")
                with stopped(redis):
                    job = up.answer("quantizations", "create", "--model", "tiny", "--no-wait")["id"]
                    found = press(up, server, options.seconds)
                state = recovered(up, job)
    for line in found.slow[:20]:
        print(f"slow: {line}")
    print(
        f"pressure: reads={found.statuses.total()} statuses={dict(found.statuses)} "
        f"longest={found.longest_s:.1f}s slow={len(found.slow)} job={state}"
    )
    return 0 if found.right() and state == "succeeded" else 1


if __name__ == "__main__":
    sys.exit(main())
