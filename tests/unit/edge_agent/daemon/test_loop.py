"""Tests of the daemon: when it polls, when it trains, what it stores, and how it ends."""

import errno
import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from permille.errors import InputError, OperatorError, PermilleError, RetryableError
from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille.package.reader import Package
from permille_agent.daemon import loop
from permille_agent.daemon.loop import POLL_LIMIT_S, POLL_S, RETRY_TRAINING_S, Daemon, World
from permille_agent.daemon.state import DaemonState, data_fingerprint, read_daemon_state
from permille_agent.daemon.training_child import READY, AssignedTraining, TrainingRequest
from permille_agent.link.api import DeviceApi
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.extension import Assignment
from permille_agent.link.report import enqueue
from permille_agent.state.choices import add_references, remove_references
from permille_agent.state.home import Home
from permille_agent.state.lock import LockedError, hold_lock
from permille_agent.state.models import Active, activate, active_model, installed_release
from permille_agent.state.policy import PowerAndLoad
from permille_agent.training.options import RunContext
from tests.device_service import DeviceService, Fault
from tests.packages import tiny_package
from tests.unit.edge_agent.conftest import fast_connection
from tests.unit.edge_agent.samples import RUN_ID, metrics

IDLE = PowerAndLoad(on_ac=True, battery=None, load=0.0)
UNPLUGGED = PowerAndLoad(on_ac=False, battery=90.0, load=0.0)


@dataclass
class Outside:
    """A clock, a machine and a training that the test controls."""

    now: datetime = field(default_factory=lambda: datetime(2026, 3, 1, 12).astimezone())
    seconds: float = 0.0
    machine: PowerAndLoad = IDLE
    outcome: str | PermilleError = "adopted"
    training_s: float = 60.0
    requests: list[TrainingRequest] = field(default_factory=list)
    stopped_after_s: list[float] = field(default_factory=list)
    during_training: Callable[[float], None] = lambda _elapsed: None

    def world(self) -> World:
        return World(
            connection=fast_connection,
            train=self.train,
            machine=lambda: self.machine,
            now=lambda: self.now,
            monotonic=lambda: self.seconds,
            rng=random.Random(0),
        )

    def pass_time(self, seconds: float) -> None:
        self.seconds += seconds
        self.now += timedelta(seconds=seconds)

    def train(self, home: Home, request: TrainingRequest, keep_going: Callable[[], bool]) -> str:
        """Train for `training_s` seconds. Every 5 seconds, ask `keep_going` whether to continue."""
        self.requests.append(request)
        if isinstance(self.outcome, PermilleError):
            raise self.outcome
        elapsed = 0.0
        while elapsed < self.training_s:
            self.pass_time(5.0)
            elapsed += 5.0
            self.during_training(elapsed)
            if not keep_going():
                self.stopped_after_s.append(elapsed)
                return "interrupted"
        return self.outcome


@pytest.fixture
def outside() -> Outside:
    """Return noon on an idle machine."""
    return Outside()


@pytest.fixture
def daemon(home: Home, enrolment: Enrolment, outside: Outside, tmp_path: Path) -> Daemon:
    """Return the daemon of an enrolled device with one user file."""
    (tmp_path / "notes.txt").write_text("text of the user")
    add_references(home, [tmp_path / "notes.txt"])
    return Daemon(home, threading.Event(), outside.world())


def test_one_pass_pulls_trains_reports_and_notes_it(
    home: Home, daemon: Daemon, outside: Outside, service: DeviceService, tmp_path: Path
) -> None:
    enqueue(home, RUN_ID, metrics(), shared_log=None)
    with hold_lock(home, "pull"):  # a process can take its own lock again
        daemon.run_once()
    assert installed_release(home) is not None
    (request,) = outside.requests
    assert request == TrainingRequest(data_paths=(tmp_path / "notes.txt",), minutes=None, share_log=False)
    state = read_daemon_state(home)
    assert (state.last_outcome, state.seconds_used) == ("adopted", 60.0)
    assert (state.poll_error, state.training_error) == ("", "")
    assert set(service.runs) == {RUN_ID}


def test_damage_on_the_disk_is_looked_for_and_mended_once_a_day(
    home: Home, daemon: Daemon, outside: Outside, service: DeviceService, package: Package
) -> None:
    daemon.run_once()
    personal = Active(package=package.digest, run="a-run")
    activate(home, personal, expected=active_model(home))
    service.publish(tiny_package(package.blobs.root, seed=1).digest, 2)
    daemon.run_once()  # the active model still needs the old package, which `pull` does not open any more
    path = BlobFolder(home.blobs).path(package.manifest.layer(Role.PLAIN).digest)
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 8]))
    daemon.run_once()
    assert path.read_bytes() != whole
    outside.pass_time(86_400.0)
    daemon.run_once()
    assert path.read_bytes() == whole


def test_new_text_is_trained_and_what_was_trained_is_not_trained_again(
    daemon: Daemon, outside: Outside, tmp_path: Path
) -> None:
    daemon.run_once()
    daemon.run_once()
    assert len(outside.requests) == 1
    (tmp_path / "notes.txt").write_text("more text of the user")
    daemon.run_once()
    assert len(outside.requests) == 2


def test_without_data_nothing_is_trained_and_without_an_enrolment_it_does_not_start(
    home: Home, enrolment: Enrolment, outside: Outside
) -> None:
    daemon = Daemon(home, threading.Event(), outside.world())
    daemon.run_once()
    assert installed_release(home) is not None
    assert outside.requests == []
    home.enrolment.unlink()
    with pytest.raises(OperatorError, match="enroll"):
        daemon.run()


def test_the_policy_holds_training_back_and_status_says_why(
    home: Home, daemon: Daemon, outside: Outside
) -> None:
    outside.machine = UNPLUGGED
    daemon.run_once()
    assert outside.requests == []
    assert read_daemon_state(home).waiting_for == ("the machine runs on battery",)
    outside.machine = IDLE
    daemon.run_once()
    assert len(outside.requests) == 1
    assert read_daemon_state(home).waiting_for == ()


def test_minutes_of_an_earlier_day_do_not_count_today() -> None:
    state = DaemonState(day="2026-11-23", seconds_used=600.0)
    assert state.minutes_used(date(2026, 11, 23)) == 10.0
    assert state.minutes_used(date(2026, 11, 24)) == 0.0


def test_one_pass_that_trains_nothing_says_why(
    home: Home, daemon: Daemon, outside: Outside, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    outside.machine = UNPLUGGED
    daemon.run_once()
    assert f"trained nothing: {'; '.join(read_daemon_state(home).waiting_for)}" in caplog.text
    outside.machine = IDLE
    caplog.clear()
    daemon.run_once()
    assert "trained nothing" not in caplog.text
    daemon.run_once()
    assert "trained nothing: text and package have not changed since the last training" in caplog.text
    remove_references(home, [tmp_path / "notes.txt"])
    daemon.run_once()
    assert "trained nothing: no text was added" in caplog.text


def test_a_pulled_plug_ends_the_training_and_it_is_resumed(
    home: Home, daemon: Daemon, outside: Outside
) -> None:
    def pull_plug(elapsed: float) -> None:
        if elapsed == 20.0:
            outside.machine = UNPLUGGED

    outside.during_training = pull_plug
    daemon.run_once()
    assert outside.stopped_after_s == [20.0]
    outside.machine, outside.during_training = IDLE, lambda _elapsed: None
    daemon.run_once()
    first, second = outside.requests
    assert first == second
    assert read_daemon_state(home).last_outcome == "adopted"


def test_the_minutes_of_the_day_end_a_training_and_the_next_day_goes_on(
    home: Home, daemon: Daemon, outside: Outside
) -> None:
    home.policy.write_text("minutes_per_day = 2\n")
    outside.training_s = 200.0
    daemon.run_once()
    assert outside.stopped_after_s == [120.0]
    daemon.run_once()
    assert len(outside.requests) == 1
    outside.pass_time(24 * 3600.0)
    outside.training_s = 60.0
    daemon.run_once()
    assert read_daemon_state(home).last_outcome == "adopted"
    assert read_daemon_state(home).seconds_used == 60.0


def test_a_failed_training_is_tried_again_later_and_later_and_one_by_hand_is_waited_for(
    home: Home, daemon: Daemon, outside: Outside
) -> None:
    outside.outcome = LockedError("`permille-agent train` holds it")
    daemon.run_once()
    assert (len(outside.requests), read_daemon_state(home).failures) == (1, 0)
    outside.requests.clear()
    outside.outcome = RetryableError("expected an answer of the training process, it ended with -9")
    tries = []
    for _hour in range(12):
        daemon.run_once()
        tries.append(len(outside.requests))
        outside.pass_time(3601.0)
    assert tries == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4]
    assert "it ended with -9" in read_daemon_state(home).training_error


def test_data_that_cannot_be_used_is_not_tried_again_until_it_changes(
    daemon: Daemon, outside: Outside, tmp_path: Path
) -> None:
    outside.outcome = InputError("expected UTF-8")
    daemon.run_once()
    outside.pass_time(48 * 3600.0)
    daemon.run_once()
    assert len(outside.requests) == 1
    (tmp_path / "notes.txt").write_text("better text")
    daemon.run_once()
    assert len(outside.requests) == 2


def test_training_goes_on_while_the_service_is_away(
    daemon: Daemon, outside: Outside, service: DeviceService, tmp_path: Path
) -> None:
    daemon.run_once()
    (tmp_path / "notes.txt").write_text("more text")
    service.faults = [Fault(path="/v1/", status=503, times=10_000)]
    with pytest.raises(RetryableError):
        daemon.run_once()
    assert len(outside.requests) == 2


def test_polls_are_spread_and_failed_ones_come_less_and_less_often(
    home: Home, daemon: Daemon, service: DeviceService
) -> None:
    pauses = [daemon.poll() for _ in range(5)]
    assert all(0.75 * POLL_S <= pause <= 1.25 * POLL_S for pause in pauses)
    assert len(set(pauses)) == 5
    service.faults = [Fault(path="/v1/", status=503, times=10_000)]
    pauses = [daemon.poll() for _ in range(7)]
    assert all(2 * POLL_S * 2**n <= pause for n, pause in enumerate(pauses[:3]))
    assert pauses[-1] <= POLL_LIMIT_S * 1.25
    assert "503" in read_daemon_state(home).poll_error
    service.faults = []
    assert daemon.poll() <= 1.25 * POLL_S
    assert read_daemon_state(home).poll_error == ""


def test_the_pause_begins_when_a_poll_ends(
    home: Home, enrolment: Enrolment, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, begun_s, slow_s = threading.Event(), list[float](), 3 * POLL_S
    daemon = Daemon(home, stop, outside.world())

    def poll() -> float:
        begun_s.append(outside.seconds)
        outside.pass_time(slow_s)
        if len(begun_s) == 3:
            stop.set()
        return POLL_S

    monkeypatch.setattr(daemon, "poll", poll)
    monkeypatch.setattr(stop, "wait", outside.pass_time)
    daemon.run()
    assert begun_s == [0.0, slow_s + POLL_S, 2 * (slow_s + POLL_S)]


def test_a_pause_that_the_service_asks_for_is_kept(daemon: Daemon, service: DeviceService) -> None:
    service.faults = [Fault(path="/v1/", status=503, headers={"retry-after": "5000"}, times=10_000)]
    assert 5000.0 <= daemon.poll() <= 1.25 * 5000.0


def test_a_refused_package_is_noted_and_the_old_one_trained(
    home: Home, daemon: Daemon, outside: Outside, service: DeviceService
) -> None:
    daemon.run_once()
    installed = installed_release(home)
    assert service.release is not None
    service.release["version"] = 2
    daemon.poll()
    assert "release-unlisted" in read_daemon_state(home).poll_error
    assert installed_release(home) == installed


def test_run_ends_when_it_is_told_to(home: Home, enrolment: Enrolment, outside: Outside) -> None:
    stop = threading.Event()
    daemon = Daemon(home, stop, outside.world())
    thread = threading.Thread(target=daemon.run)
    thread.start()
    stop.set()
    thread.join(30.0)
    assert not thread.is_alive()


def test_a_full_disk_does_not_end_the_daemon(
    home: Home,
    daemon: Daemon,
    service: DeviceService,
    outside: Outside,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon.poll()
    service.faults = [Fault(path="/v1/", status=503, times=10_000)]
    stop, waits = threading.Event(), list[float]()

    def refuse(*_: object) -> None:
        raise OperatorError("no space left on the device")

    def wait(seconds: float) -> None:
        waits.append(seconds)
        stop.set()

    monkeypatch.setattr(loop, "write_record", refuse)
    monkeypatch.setattr(stop, "wait", wait)
    Daemon(home, stop, outside.world()).run()
    assert waits == [POLL_S]
    assert "no space left" in caplog.text


def test_an_exchange_that_finds_the_disk_full_ends_neither_the_daemon_nor_a_training(
    home: Home, daemon: Daemon, outside: Outside, assigned: "Assigned"
) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assigned.exchanging = refuse
    daemon.poll()
    assert "No space left" in read_daemon_state(home).poll_error
    outside.pass_time(POLL_S)
    assert not daemon.exchange_meanwhile()


def test_a_training_that_the_disk_refused_is_tried_again_later(
    home: Home, daemon: Daemon, outside: Outside
) -> None:
    outside.outcome = OperatorError("no space left on the device")
    daemon.run_once()
    assert "no space left" in read_daemon_state(home).training_error
    outside.outcome = "adopted"
    outside.pass_time(RETRY_TRAINING_S + 1.0)
    daemon.run_once()
    assert read_daemon_state(home).last_outcome == "adopted"


def test_a_wrong_policy_stops_training_alone_and_is_told(
    home: Home, daemon: Daemon, outside: Outside
) -> None:
    daemon.poll()
    home.policy.write_text("ours = []")
    assert not daemon.train_if_wanted()
    assert outside.requests == []
    assert "ours" in read_daemon_state(home).waiting_for[0]
    Daemon(home, threading.Event(), outside.world()).run_once()
    assert outside.requests == []
    assert not read_daemon_state(home).poll_error


@pytest.mark.parametrize(
    ("outcome", "logged"),
    [
        ("adopted", "training starts: 1 data references"),
        (InputError("expected text in notes.txt, got none"), "training: InputError"),
    ],
)
def test_the_log_holds_neither_text_nor_names_of_the_user(
    home: Home, daemon: Daemon, outside: Outside, caplog: pytest.LogCaptureFixture, outcome: Any, logged: str
) -> None:
    outside.outcome = outcome
    with caplog.at_level(logging.DEBUG):
        daemon.run_once()
    assert logged in caplog.text
    assert "notes" not in caplog.text
    assert "text of the user" not in caplog.text
    assert ("notes" in read_daemon_state(home).training_error) == (outcome != "adopted")


def test_a_fingerprint_follows_files_in_folders(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.txt").write_text("a")
    first = data_fingerprint([folder])
    assert data_fingerprint([folder]) == first
    (folder / "deep" / "b.txt").write_text("b")
    second = data_fingerprint([folder])
    (folder / "deep" / "b.txt").unlink()
    assert len({first, second}) == 2
    assert data_fingerprint([folder, tmp_path / "gone.txt"]) == first
    # `Path.is_dir` raises for such a path, as for a network folder whose server does not answer.
    assert data_fingerprint([folder, tmp_path / ("x" * 300)]) == first


@dataclass
class Assigned:
    """Assigned trainings of an extension: the one that waits, if any, and the times of exchanges."""

    training: Assignment | None = None
    exchanged_s: list[float] = field(default_factory=list)
    outcome: str | PermilleError = READY
    requests: list[AssignedTraining] = field(default_factory=list)
    failed: list[PermilleError] = field(default_factory=list)
    exchanging: Callable[[], None] = lambda: None

    def assign(self, *, is_wanted: bool = True) -> None:
        self.training = Assignment(
            name="round 3", order="readers/3", is_wanted=lambda: is_wanted, fail=self.failed.append
        )

    def exchange(self, _home: Home, _api: DeviceApi, *, now: datetime, has_text: bool) -> None:
        self.exchanging()
        assert has_text
        assert now.tzinfo is not None

    def waiting(self, _home: Home, *, now: datetime) -> Assignment | None:
        return self.training

    def train(self, home: Home, order: str, data_paths: Sequence[Path], context: RunContext) -> bool:
        raise AssertionError("an assigned training runs in a process of its own")

    def train_in_child(self, _home: Home, request: AssignedTraining, keep_going: Callable[[], bool]) -> str:
        self.requests.append(request)
        if isinstance(self.outcome, PermilleError):
            raise self.outcome
        if not keep_going():
            return "interrupted"
        self.training = None
        return self.outcome


@pytest.fixture
def assigned(daemon: Daemon, outside: Outside, monkeypatch: pytest.MonkeyPatch) -> Assigned:
    """Replace the extensions' assigned trainings with those of the test."""
    assigned = Assigned()
    assigned.exchanging = lambda: assigned.exchanged_s.append(outside.seconds)
    monkeypatch.setattr(loop, "assignments", lambda: {"rounds": assigned})
    daemon._world = replace(outside.world(), train_assigned=assigned.train_in_child)
    return assigned


def test_extensions_exchange_while_a_training_runs_and_holds_the_lock(
    daemon: Daemon, outside: Outside, assigned: Assigned
) -> None:
    outside.training_s = 2 * POLL_S + 100.0
    daemon.run_once()
    assert assigned.exchanged_s == [0.0, POLL_S, 2 * POLL_S, outside.training_s]


def test_a_slow_exchange_that_fails_is_not_repeated_at_once(
    daemon: Daemon, outside: Outside, assigned: Assigned
) -> None:
    def fail() -> None:
        assigned.exchanged_s.append(outside.seconds)
        outside.pass_time(3 * POLL_S)
        raise RetryableError("the service does not answer")

    assigned.exchanging = fail
    for _ in range(3):
        daemon.exchange_meanwhile()
    assert assigned.exchanged_s == [0.0]


def test_an_assigned_training_goes_before_a_personal_run_which_goes_on_later(
    home: Home, daemon: Daemon, outside: Outside, assigned: Assigned, tmp_path: Path
) -> None:
    def invite(elapsed: float) -> None:
        if elapsed == 30.0:
            assigned.assign()

    outside.during_training = invite
    daemon.run_once()
    assert outside.stopped_after_s == [30.0]
    assert assigned.requests == []
    outside.during_training = lambda _elapsed: None
    daemon.run_once()
    asked = AssignedTraining(extension="rounds", order="readers/3", data_paths=(tmp_path / "notes.txt",))
    assert assigned.requests == [asked]
    assert outside.requests[0] == outside.requests[1]
    assert read_daemon_state(home).last_outcome == "adopted"


def test_an_assigned_training_waits_for_the_policy_like_a_run(
    daemon: Daemon, outside: Outside, assigned: Assigned
) -> None:
    assigned.assign()
    outside.machine = UNPLUGGED
    daemon.run_once()
    assert assigned.requests == []
    outside.machine = IDLE
    daemon.run_once()
    assert len(assigned.requests) == 1


def test_an_assigned_training_that_is_not_wanted_any_more_is_stopped(
    daemon: Daemon, assigned: Assigned
) -> None:
    assigned.assign(is_wanted=False)
    assert not daemon.train_if_wanted()
    assert len(assigned.requests) == 1
    assigned.outcome = OperatorError("its folder is gone")
    assert not daemon.train_if_wanted()
    assert assigned.failed == []


def test_an_assigned_training_that_cannot_succeed_ends_and_one_whose_process_died_is_tried_again(
    daemon: Daemon, outside: Outside, assigned: Assigned
) -> None:
    assigned.assign()
    assigned.outcome = RetryableError("it ended with -9")
    assert not daemon.train_if_wanted()
    assert not daemon.train_if_wanted()
    assert len(assigned.requests) == 1
    assert assigned.failed == []
    outside.pass_time(3601.0)
    assigned.outcome = InputError("There is too little text.")
    assert not daemon.train_if_wanted()
    assert assigned.failed == [assigned.outcome]
