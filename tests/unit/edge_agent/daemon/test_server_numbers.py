"""Numbers out of range from a service, and failures of a poll: none ends a member's daemon."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille.package.reader import Package
from permille.schemas import devices, releases
from permille.schemas.fields import MAX_INTEGER
from permille_agent.daemon import loop
from permille_agent.daemon.loop import LONGEST_PAUSE_S, POLL_LIMIT_S, POLL_S, Daemon, World
from permille_agent.daemon.state import read_daemon_state
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import ServiceUnavailableError
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.report import enqueue
from permille_agent.state.choices import add_references
from permille_agent.state.home import Home, write_record
from permille_agent.state.models import installed_release
from permille_agent.state.policy import PowerAndLoad
from tests.device_service import DeviceService, Fault
from tests.unit.edge_agent.conftest import fast_connection
from tests.unit.edge_agent.daemon.test_loop import Assigned
from tests.unit.edge_agent.samples import RUN_ID, metrics

pytestmark = pytest.mark.attack(21, "numbers that end a member's daemon")

READ = (
    devices.Enrolment,
    devices.DeviceNonce,
    devices.DeviceToken,
    releases.Release,
)
DIGEST = "sha256:" + "0" * 64
FAR = ("1e14", "1e308", "1e999", "-1", "NaN", "Infinity", str(10**400), '"60"', "null", "[]", "true")


def check_bounds(record: type[BaseModel]) -> None:
    """Check that every number of a record has both bounds."""
    for name, field in record.model_json_schema()["properties"].items():
        for kind in field.get("anyOf", [field]):
            if kind.get("type") in ("number", "integer"):
                assert kind["minimum"] >= 0, name
                assert kind["maximum"] <= MAX_INTEGER, name


@pytest.mark.parametrize("record", READ)
def test_every_number_that_a_device_reads_has_both_bounds(record: type[BaseModel]) -> None:
    check_bounds(record)


def answer(document: dict[str, Any], name: str, number: str) -> bytes:
    """Return a JSON object in which the value of one field is the text `number`."""
    return json.dumps({**document, name: "HERE"}).replace('"HERE"', number).encode()


@pytest.mark.parametrize("number", FAR)
def test_a_token_with_a_lifetime_out_of_range_is_no_answer(
    api: DeviceApi, service: DeviceService, number: str
) -> None:
    token = {"access_token": "t", "token_type": "Bearer", "expires_in": 3600}
    service.faults = [Fault(path="/device-tokens$", status=201, body=answer(token, "expires_in", number))]
    with pytest.raises(ServiceUnavailableError, match="malformed"):
        api.call("GET", "/v1/device")


@pytest.mark.parametrize(
    "error", [OverflowError, ValueError, RecursionError, MemoryError, KeyError, OSError, ZeroDivisionError]
)
def test_a_poll_that_fails_in_any_way_is_noted_and_stops_no_other_step(
    home: Home,
    enrolment: Enrolment,
    service: DeviceService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("words of the user")

    monkeypatch.setattr(loop, "assignments", lambda: {"rounds": Assigned(exchanging=fail)})
    enqueue(home, RUN_ID, metrics(), shared_log=None)
    daemon = Daemon(home, threading.Event(), World(connection=fast_connection))
    assert POLL_S <= daemon.poll() <= 1.25 * POLL_LIMIT_S
    assert set(service.runs) == {RUN_ID}
    assert installed_release(home) is not None
    assert read_daemon_state(home).poll_error
    assert ("words of the user" in caplog.text) == (error is OSError)
    assert not daemon.exchange_meanwhile()


def test_the_loop_goes_on_after_any_failure(
    home: Home, enrolment: Enrolment, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, waits = threading.Event(), list[float]()
    daemon = Daemon(home, stop, World(connection=fast_connection))

    def fail() -> bool:
        raise OverflowError("date value out of range")

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            stop.set()

    monkeypatch.setattr(daemon, "train_if_wanted", fail)
    monkeypatch.setattr(stop, "wait", wait)
    daemon.run()
    assert waits == [POLL_S] * 3


@pytest.mark.parametrize("name", ["reports", "runs"])
def test_one_damaged_record_stops_no_other_report(
    home: Home, enrolment: Enrolment, service: DeviceService, name: str
) -> None:
    damaged = {
        "reports": home.reports / "00000000-0000-4000-8000-000000000000.json",
        "runs": home.runs / "a-run" / "outcome.json",
    }[name]
    damaged.parent.mkdir(exist_ok=True)
    if name == "runs":
        (damaged.parent / "run.json").write_bytes(b"{")
    damaged.write_bytes(b"{")
    enqueue(home, RUN_ID, metrics(), shared_log=None)
    daemon = Daemon(home, threading.Event(), World(connection=fast_connection))
    assert daemon.poll() <= 1.25 * LONGEST_PAUSE_S
    assert str(damaged.name) in read_daemon_state(home).poll_error
    assert set(service.runs) == {RUN_ID}
    assert installed_release(home) is not None


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xff", b'{"facts": 1e99}', b'hours = "always"'])
@pytest.mark.parametrize("name", ["rollout.json", "policy.toml"])
def test_a_damaged_part_of_a_rollout_or_policy_stops_neither_reports_nor_pulls(
    home: Home, enrolment: Enrolment, service: DeviceService, tmp_path: Path, name: str, data: bytes
) -> None:
    (tmp_path / "notes.txt").write_text("text of the user")
    add_references(home, [tmp_path / "notes.txt"])
    (home.root / name).write_bytes(data)
    enqueue(home, RUN_ID, metrics(), shared_log=None)
    trained: list[object] = []

    def train(*asked: object) -> str:
        trained.append(asked)
        return "adopted"

    idle = PowerAndLoad(on_ac=True, battery=None, load=0.0)
    world = World(connection=fast_connection, train=train, machine=lambda: idle)
    Daemon(home, threading.Event(), world).run_once()
    assert set(service.runs) == {RUN_ID}
    assert installed_release(home) is not None
    is_policy = name == "policy.toml" and data != b""  # an empty policy is the default one
    assert len(trained) == (0 if is_policy else 1)
    assert any(name in reason for reason in read_daemon_state(home).waiting_for) == is_policy


@pytest.mark.parametrize("fault", ["unlisted", "unreachable"])
def test_the_daily_check_runs_while_pulls_fail(
    home: Home, enrolment: Enrolment, service: DeviceService, package: Package, fault: str
) -> None:
    daemon = Daemon(home, threading.Event(), World(connection=fast_connection))
    daemon.run_once()
    write_record(home.daemon, replace(read_daemon_state(home), verified=""))
    path = BlobFolder(home.blobs).path(package.manifest.layer(Role.PLAIN).digest)
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 8]))
    assert service.release is not None
    service.release["version"] = 99
    if fault == "unreachable":
        service.faults = [Fault(path="/aliases/", status=503, times=99)]
    daemon.poll()
    assert read_daemon_state(home).poll_error
    assert path.read_bytes() == whole
    assert read_daemon_state(home).verified
