"""The daemon. It polls the service, pulls packages, trains when the policy allows, and sends reports.

The daemon keeps its state only in the home folder, and each action can be resumed. So it may be killed at any
moment. `daemon.json` has the minutes used today, the failures and the last training. The log contains no text
and no file names of the user.
"""

import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

from permille.errors import InputError, OperatorError, PermilleError, RetryableError
from permille_agent.daemon.state import DaemonState, data_fingerprint, read_daemon_state
from permille_agent.daemon.training_child import (
    READY,
    AssignedTraining,
    ChildDiedError,
    TrainingRequest,
    train_in_child,
)
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import ServiceUnavailableError
from permille_agent.link.enrolment import Connect, connect, open_api, require_enrolment
from permille_agent.link.extension import Assignment, Assignments, assignments, version_choices
from permille_agent.link.pull import pull
from permille_agent.link.report import collect_reports, deliver
from permille_agent.link.verify import verify
from permille_agent.state.choices import read_consent, read_references
from permille_agent.state.home import Home, telling_disk, write_record
from permille_agent.state.lock import LockedError, hold_lock
from permille_agent.state.models import installed_release
from permille_agent.state.policy import (
    Policy,
    PowerAndLoad,
    read_machine,
    read_policy,
    reasons_to_stop,
    reasons_to_wait,
)
from permille_agent.training.adopted import adopted_round
from permille_agent.training.engines import AUTO

POLL_S = 900.0  # between two polls of the service
POLL_LIMIT_S = 6 * 3600.0  # longest pause after failed polls
POLICY_CHECK_S = 60.0
JITTER = 0.25  # spreads the polls of many devices, which may all start after one power cut
RETRY_TRAINING_S = 3600.0  # pause after the first failed training; each further failure doubles it
PIECE_S = 10.0  # a kill loses at most this much of the counted training time
LONGEST_PAUSE_S = 24 * 3600.0

log = logging.getLogger("permille.agent")

Train = Callable[[Home, TrainingRequest, Callable[[], bool]], str]
TrainAssigned = Callable[[Home, AssignedTraining, Callable[[], bool]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Outside world of the daemon. Tests replace the clock, the machine and the training."""

    connection: Connect = connect
    train: Train = train_in_child
    train_assigned: TrainAssigned = train_in_child
    machine: Callable[[], PowerAndLoad] = read_machine
    now: Callable[[], datetime] = lambda: datetime.now().astimezone()
    monotonic: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)


class Daemon:
    """The daemon of a home folder. The caller holds the daemon's lock.

    For example, one pass:

        with hold_lock(home, "run", of=home.daemon_lock):
            Daemon(home, threading.Event()).run_once()

    Args:
        home: the home folder.
        stop: event that ends the daemon cleanly.
        world: the outside world, for tests.
        engine: name of the engine for trainings.
    """

    def __init__(
        self, home: Home, stop: threading.Event, world: World | None = None, *, engine: str = AUTO
    ) -> None:
        self._home = home
        self._engine = engine
        self._stop = stop
        self._world = world or World()
        self._failed_polls = 0
        self._next_exchange = 0.0

    def run(self) -> None:
        """Work until `stop` is set.

        Raises:
            OperatorError: the device is not enrolled.
        """
        require_enrolment(self._home)
        next_poll = self._world.monotonic()
        while not self._stop.is_set():
            if self._world.monotonic() >= next_poll:
                # A poll can take longer than the pause after it, so the pause begins at its end.
                pause_s = self.poll()
                next_poll = self._world.monotonic() + pause_s
            try:
                with telling_disk():
                    trained = self.train_if_wanted()
            except Exception as exc:  # noqa: BLE001 - the daemon goes on after any failure
                # The disk is full, or a record is damaged. After a few quick restarts, systemd would give up.
                log.warning("training: %s", _loggable(exc))
                self._stop.wait(POLL_S)
                continue
            # After a training, poll at once to report its result.
            if trained:
                next_poll = self._world.monotonic()
                continue
            # Wait at most a minute, because the policy may allow a training before the next poll.
            self._stop.wait(max(0.0, min(POLICY_CHECK_S, next_poll - self._world.monotonic())))
        log.info("stopped")

    def run_once(self) -> None:
        """Run one pass: poll, train if there is data and the policy allows it, and report.

        Raises:
            PermilleError: a step of the poll failed. The other steps and the training run before this error
                is raised.
        """
        require_enrolment(self._home)
        try:
            self._poll()
        finally:
            trained = 0
            while trained < 2 and self.train_if_wanted():  # an assigned training, then a personal run
                trained += 1
                self._poll()
            if not trained:
                log.info("trained nothing: %s", self._why_not())

    def poll(self) -> float:
        """Report and pull. Errors are logged and kept for `status`. Return the seconds to the next poll."""
        try:
            with telling_disk():
                self._poll()
        except Exception as exc:  # noqa: BLE001 - the daemon goes on after any failure
            # LockedError means that another command is running, so the next pause need not be longer.
            self._failed_polls += 0 if isinstance(exc, LockedError) else 1
            log.warning("poll: %s", _loggable(exc))
            with suppress(OperatorError):  # on a full disk, the log has the error
                self._note(poll_error=_words(exc))
            return self._pause_after(exc)
        self._failed_polls = 0
        return POLL_S * (1.0 + self._world.rng.uniform(-JITTER, JITTER))

    def train_if_wanted(self) -> bool:
        """Train if there is something new and the policy allows it. Return whether a training finished.

        An assigned training, such as for a round, comes before a personal run.
        """
        assigned, wanted = self._assigned(), self._wanted()
        if (assigned is None and wanted is None) or self._stop.is_set():
            return False
        try:
            policy = read_policy(self._home)
        except InputError as exc:  # a mistake of the owner stops trainings, and neither pulls nor reports
            if (str(exc),) != read_daemon_state(self._home).waiting_for:
                log.warning("training waits: %s", exc)
                self._note(waiting_for=(str(exc),))
            return False
        state = self._today(read_daemon_state(self._home))
        now, used = self._world.now(), state.seconds_used / 60.0
        reasons = reasons_to_wait(policy, self._world.machine(), now=now, minutes_used=used)
        # A `not_before` more than a day ahead was stored while the clock was wrong, so ignore it.
        if 0 < state.not_before - now.timestamp() <= LONGEST_PAUSE_S:
            reasons += ("the last training failed and is tried again later",)
        # Write only if the reasons changed. This check runs once a minute, and each write is an fsync.
        if reasons != state.waiting_for:
            self._note(waiting_for=reasons)
        if reasons:
            log.debug("training waits: %s", "; ".join(reasons))
            return False
        if assigned is not None:
            return self._train_assigned(policy, *assigned)
        return wanted is not None and self._train(policy, wanted)

    def _why_not(self) -> str:
        """Describe why nothing was trained."""
        if self._wanted() is not None or self._assigned() is not None:
            state = read_daemon_state(self._home)
            return "; ".join(state.waiting_for) or "`permille-agent status` says why"
        if not read_references(self._home):
            return "no text was added (`permille-agent data add`)"
        return "text and package have not changed since the last training"

    def _poll(self) -> None:
        """Run all steps of a poll. A step that fails does not stop the others. Raise the first error."""
        failed: list[Exception] = []

        def run(step: Callable[[DeviceApi], None]) -> None:
            try:
                with telling_disk():
                    step(api)
            except Exception as exc:  # noqa: BLE001 - raised below
                failed.append(exc)

        with open_api(self._home, connection=self._world.connection) as api:
            # Exchange before taking the writers' lock, because a training may hold that lock for hours.
            for source in assignments().values():
                run(partial(self._exchange, source))
            with hold_lock(self._home, "run"):
                for step in (self._collect, self._deliver, self._pull, self._mend_packages):
                    run(step)
        for other in failed[1:]:
            log.warning("poll: %s", _loggable(other))
        if failed:
            raise failed[0]
        self._note(poll_error="", last_poll=self._world.now().isoformat(timespec="seconds"))

    def _collect(self, _api: DeviceApi) -> None:
        collect_reports(self._home)

    def _deliver(self, api: DeviceApi) -> None:
        delivered = deliver(self._home, api)
        if delivered.sent or delivered.refused:
            log.info("reports: %d delivered, %d refused", delivered.sent, delivered.refused)

    def _pull(self, api: DeviceApi) -> None:
        enrolment, _ = require_enrolment(self._home)
        pulled = pull(self._home, api, enrolment, now_s=self._world.now().timestamp())
        if pulled.changed:
            log.info("installed %s version %d", pulled.release.name, pulled.release.version)
        if pulled.text_rules:
            log.warning("the tokenizer has changed: %s", pulled.text_rules)

    def _exchange(self, source: Assignments, api: DeviceApi) -> None:
        """Send results of assigned trainings, and ask for new ones."""
        try:
            has_text = bool(read_references(self._home))
            source.exchange(self._home, api, now=self._world.now(), has_text=has_text)
        finally:
            # Also after a failed exchange, so that it is not repeated at once.
            self._next_exchange = self._world.monotonic() + POLL_S

    def exchange_meanwhile(self) -> bool:
        """Exchange during a training. Return whether the training should stop for an assigned one."""
        due = self._world.monotonic() >= self._next_exchange
        for name, source in assignments().items() if due else ():
            try:
                with telling_disk(), open_api(self._home, connection=self._world.connection) as api:
                    self._exchange(source, api)
            except Exception as exc:  # noqa: BLE001 - the training goes on after any failure
                log.warning("%s: %s", name, _loggable(exc))
        return self._assigned() is not None

    def _assigned(self) -> tuple[str, Assignment] | None:
        """Return the next assigned training, with the name of its extension."""
        for name, source in assignments().items():
            try:
                if not read_references(self._home):
                    return None
                if (found := source.waiting(self._home, now=self._world.now())) is not None:
                    return name, found
            except PermilleError as exc:
                log.warning("%s: %s: %s", name, type(exc).__name__, exc)
        return None

    def _mend_packages(self, api: DeviceApi) -> None:
        """Check the packages for damage once a day, and repair it before a damaged block is needed."""
        today = self._world.now().date().isoformat()
        if read_daemon_state(self._home).verified == today:
            return
        found = verify(self._home, api)
        for what in found.damaged:
            log.warning("damaged on the disk: %s", what)
        if found.damaged:
            log.warning("damage: %d mended, %d left", len(found.damaged) - len(found.left), len(found.left))
        self._note(verified=today)

    def _wanted(self) -> str | None:
        """Return a fingerprint of package, data and adopted round, or None if there is nothing new."""
        release, paths = installed_release(self._home), read_references(self._home)
        if release is None or not paths:
            return None
        wanted = f"{release.manifest_digest} {data_fingerprint(paths)}"
        if (adopted := adopted_round(self._home, release.manifest_digest)) is not None:
            wanted = f"{wanted} {adopted.start}"
        return None if wanted == read_daemon_state(self._home).trained else wanted

    def _train_assigned(self, policy: Policy, extension: str, assigned: Assignment) -> bool:
        """Do an assigned training. Return whether its result is ready to be sent."""
        request = AssignedTraining(
            extension=extension,
            order=assigned.order,
            data_paths=read_references(self._home),
            engine=self._engine,
        )
        log.info("%s starts", assigned.name)
        try:
            with self._metered(policy, assigned.is_wanted) as keep_going:
                outcome = self._world.train_assigned(self._home, request, keep_going)
        except LockedError as exc:
            log.info("%s waits: %s", assigned.name, exc)
            return False
        except PermilleError as exc:
            if isinstance(exc, RetryableError):
                self._put_off(exc)
            elif assigned.is_wanted():
                log.warning("%s: `permille-agent status` says why it failed", assigned.name)
                assigned.fail(exc)
            return False
        log.info("%s ended: %s", assigned.name, outcome)
        return outcome == READY

    def _train(self, policy: Policy, wanted: str) -> bool:
        consent = read_consent(self._home)
        request = TrainingRequest(
            data_paths=read_references(self._home),
            minutes=policy.minutes_per_run,
            method=policy.method,
            share_log=consent.share_log,
            share_state=consent.share_state,
            withdrawals=consent.withdrawals,
            engine=self._engine,
        )
        log.info("training starts: %d data references", len(request.data_paths))
        try:
            with self._metered(policy, lambda: not self.exchange_meanwhile()) as keep_going:
                outcome = self._world.train(self._home, request, keep_going)
        except LockedError as exc:
            log.info("training waits: %s", exc)
            return False
        except PermilleError as exc:
            self._training_failed(exc, wanted)
            return False
        log.info("training ended: %s", outcome)
        # An interrupted run is resumed later, so do not store it as trained.
        if outcome == "interrupted":
            self._note(last_outcome=outcome)
            return False
        self._note(last_outcome=outcome, trained=wanted, failures=0, not_before=0.0, training_error="")
        return True

    def _training_failed(self, error: PermilleError, wanted: str) -> None:
        """Plan another attempt if the error may pass. Otherwise wait for a new package or new data."""
        # An InputError may name the user's files, and these must not get into the system's log.
        words = "`permille-agent status` says why" if isinstance(error, InputError) else str(error)
        log.warning("training: %s: %s", type(error).__name__, words)
        if isinstance(error, ChildDiedError):
            with suppress(LockedError), hold_lock(self._home, "run"):
                for versions in version_choices():
                    versions.note_failure(
                        self._home, error, now_s=self._world.now().timestamp(), is_crash=True
                    )
        # After an OperatorError, a person may have freed the disk.
        if isinstance(error, RetryableError | OperatorError):
            self._put_off(error)
        else:
            self._note(trained=wanted, failures=0, not_before=0.0, training_error=_words(error))

    def _put_off(self, error: PermilleError) -> None:
        """Plan another attempt, with a pause that doubles after each failure."""
        failures = read_daemon_state(self._home).failures + 1
        pause_s = min(LONGEST_PAUSE_S, RETRY_TRAINING_S * 2.0 ** (failures - 1))
        until = self._world.now().timestamp() + pause_s
        self._note(failures=failures, not_before=until, training_error=_words(error))

    def _pause_after(self, error: Exception) -> float:
        # The exponent is limited, because a large power of 2.0 raises OverflowError.
        pause_s = min(POLL_LIMIT_S, POLL_S * 2.0 ** min(self._failed_polls, 10))
        if isinstance(error, ServiceUnavailableError) and error.retry_after_s is not None:
            # The service's own estimate counts, but a wrong estimate must not silence the device for days.
            pause_s = min(POLL_LIMIT_S, max(error.retry_after_s, POLICY_CHECK_S))
        return pause_s * (1.0 + self._world.rng.uniform(0.0, JITTER))

    @contextmanager
    def _metered(self, policy: Policy, wanted: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        """Count the time of a training. Yield a function that returns whether the training may continue.

        The time is stored every `PIECE_S` seconds, so that a kill loses little of it. The training ends if
        the policy forbids it, if the daemon stops, or if `wanted` returns False.
        """
        since = self._world.monotonic()

        def charge() -> float:
            nonlocal since
            now = self._world.monotonic()
            used, since = now - since, now
            state = self._today(read_daemon_state(self._home))
            state = replace(state, seconds_used=state.seconds_used + used)
            write_record(self._home.daemon, state)
            return state.seconds_used

        def keep_going() -> bool:
            is_due = self._world.monotonic() - since >= PIECE_S
            if is_due and charge() >= policy.minutes_per_day * 60.0:
                log.info("training stops: the minutes of today are used")
                return False
            if reasons := reasons_to_stop(policy, self._world.machine(), now=self._world.now()):
                log.info("training stops: %s", "; ".join(reasons))
            return not reasons and not self._stop.is_set() and wanted()

        try:
            yield keep_going
        finally:
            charge()

    def _today(self, state: DaemonState) -> DaemonState:
        today = self._world.now().date().isoformat()
        return state if state.day == today else replace(state, day=today, seconds_used=0.0)

    def _note(self, **changes: Any) -> None:
        state = self._today(read_daemon_state(self._home))
        write_record(self._home.daemon, replace(state, **changes))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _loggable(error: Exception) -> str:
    """Return an error for the log.

    The message of an unexpected error may contain text of the user. So only its type and line are returned.
    """
    if isinstance(error, PermilleError):
        return f"{type(error).__name__}: {error}"
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in line {at.lineno} of {at.filename}"
