"""Malformed messages in the broker's queue: the worker drops and logs them. Redis and the worker are real."""

import base64
import copy
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from permille.package.blobs import BlobFolder
from permille.store.jobs.dispatch import QUEUE, CeleryDispatcher
from permille_workers.runtime import sweeper as sweeper_module
from permille_workers.runtime.broker import is_ours
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.supervisor import Shutdown
from permille_workers.runtime.sweeper import Sweeper
from tests.integration.job_site import Redis, Site, job_site, redis_server, wait_until

Message = dict[str, Any]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def site(tmp_path: Path, redis: Redis) -> Iterator[Site]:
    with job_site(tmp_path, broker_url=redis.url) as place:
        yield place


def command(redis: Redis, *parts: bytes) -> bytes:
    """Send one command in the protocol of Redis. Return the first bytes of the answer."""
    sent = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    with closing(socket.create_connection(("127.0.0.1", redis.port), timeout=30)) as connection:
        connection.sendall(sent)
        return connection.recv(65536)


def push(redis: Redis, data: bytes) -> None:
    assert command(redis, b"LPUSH", QUEUE.encode(), data).startswith(b":")


def good_message(redis: Redis, site: Site) -> Message:
    """Return a message as the service sends it."""
    assert site.broker_url is not None
    CeleryDispatcher(site.broker_url).send("job_none")
    answer = command(redis, b"RPOP", QUEUE.encode())
    message: Message = json.loads(answer.split(b"\r\n", 1)[1])
    return message


def changed(message: Message, part: str | None, **changes: Any) -> bytes:
    other = copy.deepcopy(message)
    (other if part is None else other[part]).update(changes)
    return json.dumps(other).encode()


def body_of(arguments: Any) -> str:
    return base64.b64encode(json.dumps(arguments).encode()).decode()


def without(message: Message, name: str) -> bytes:
    return json.dumps({key: value for key, value in message.items() if key != name}).encode()


BAD: dict[str, Callable[[Message], bytes]] = {
    "no JSON": lambda _: b"no JSON",
    "nothing": lambda _: b"",
    "no UTF-8": lambda _: b"\xff\xfe\x00",
    "nested": lambda _: b"[" * 200_000,
    "a list": lambda _: b"[1, 2]",
    "a number": lambda _: b"1e999",
    "empty": lambda _: b"{}",
    "no headers": lambda m: without(m, "headers"),
    "no properties": lambda m: without(m, "properties"),
    "no body": lambda m: without(m, "body"),
    "headers of another shape": lambda m: changed(m, None, headers=["task"]),
    "properties of another shape": lambda m: changed(m, None, properties="x"),
    "no delivery tag": lambda m: changed(m, "properties", delivery_tag=None),
    "no delivery info": lambda m: changed(m, "properties", delivery_info=7),
    "an unknown encoding": lambda m: changed(m, "properties", body_encoding="rot13"),
    "a body that is no base64": lambda m: changed(m, None, body="%%%"),
    "an unknown task": lambda m: changed(m, "headers", task="os.system"),
    "a task of Celery's own": lambda m: changed(m, "headers", task="celery.backend_cleanup"),
    "no task": lambda m: changed(m, "headers", task=None),
    "a time to come": lambda m: changed(m, "headers", eta="2999-01-01T00:00:00"),
    "a pickle": lambda m: changed(m, None, **{"content-type": "application/x-python-serialize"}),
    "no arguments": lambda m: changed(m, None, body=body_of([[], {}, {}])),
    "too many arguments": lambda m: changed(m, None, body=body_of([["a", "b"], {}, {}])),
    "something to call": lambda m: changed(m, None, body=body_of([["a"], {}, {"chain": [{"task": "x"}]}])),
    "enormous": lambda m: changed(m, None, body="x" * (32 << 20)),
}


@pytest.mark.attack(11, "pushes anything into the broker's queue")
def test_whatever_is_in_the_queue_is_dropped_and_the_worker_lives(site: Site, redis: Redis) -> None:
    good = good_message(redis, site)
    site.settings["SWEEP_S"] = "600"  # Only messages start jobs, not the sweep.
    worker = site.start_worker()
    for make in BAD.values():
        push(redis, make(good))
    job = site.submit()  # A valid message shows that the worker still listens.
    assert site.broker_url is not None
    assert CeleryDispatcher(site.broker_url).send(job.id)
    site.wait_for_state(job, "succeeded")
    wait_until(lambda: command(redis, b"LLEN", QUEUE.encode()) == b":0\r\n", site.explain)
    assert worker.poll() is None
    log = site.explain()
    assert log.count("dropped a message") == len(BAD), log
    assert "Traceback" not in log
    assert command(redis, b"HLEN", b"unacked") == b":0\r\n"


@pytest.mark.attack(11, "pushes anything into the broker's queue")
def test_only_what_the_service_sends_passes(site: Site, redis: Redis) -> None:
    good = good_message(redis, site)
    assert is_ours(good)
    passed = []
    for name, make in BAD.items():
        try:
            parsed = json.loads(make(good))
        except (ValueError, RecursionError):
            continue
        if is_ours(parsed):
            passed.append(name)
    assert passed == []


@pytest.mark.attack(10, "lets jobs wait until messages of them fill the broker")
def test_messages_of_jobs_that_wait_do_not_pile_up(
    site: Site, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper_module, "RESEND_AFTER_S", 1e-6)
    for _ in range(40):
        site.submit()
    values = {name.removeprefix("PERMILLE_").lower(): value for name, value in site.environment().items()}
    settings = WorkerSettings.model_validate(values)
    assert site.broker_url is not None
    dispatcher = CeleryDispatcher(site.broker_url)
    sweeper = Sweeper(
        name="w",
        db=site.db,
        blobs=BlobFolder(settings.blob_root),
        settings=settings,
        shutdown=Shutdown(),
        dispatcher=dispatcher,
    )
    lengths = []
    for _ in range(8):
        sweeper.sweep()
        lengths.append(dispatcher.waiting())
    assert lengths == [40, 80, 120, 120, 120, 120, 120, 120]
    redis.kill()
    assert dispatcher.waiting() == 0
