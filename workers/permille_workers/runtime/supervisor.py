"""Supervision of the child process that works on a claim.

The supervisor renews the lease of the job and checks whether the job was cancelled. It computes nothing
itself, so no long call can delay the renewal. It kills the child if the lease is lost, if the child is still
running some seconds after a cancellation, and at the deadline of a shutdown.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, BinaryIO, cast

from sqlalchemy.exc import DBAPIError

from permille.control_groups import processor_limit
from permille.schemas.jobs import JobState
from permille.store.database import Database
from permille.store.errors import StaleClaimError
from permille.store.jobs import claims
from permille.store.jobs.claims import Claim
from permille.store.migrations.schema import check_newest
from permille.telemetry import Trace, watching
from permille_workers.runtime.handover import encode_handover
from permille_workers.runtime.metrics import ATTEMPT_S, LEASES_LOST
from permille_workers.runtime.settings import WorkerSettings

CHILD_COMMAND = (sys.executable, "-P", "-m", "permille_workers.runtime.child")
CANCEL_GRACE_S = 10.0  # seconds after which a cancelled job is killed
_TAIL_LINES = 40  # last lines of the child's log, for the error of a crash
_LAST_WORDS_S = 5.0  # time that a child gets to exit after its claim became stale
_TOLD_BY_CHILD = (JobState.SUCCEEDED, JobState.FAILED)  # states that only the child sets
# Libraries must not write progress bars into the log, nor send telemetry.
_QUIET = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Shutdown:
    """A request to stop a worker.

    After the request, the worker takes no more jobs. At the deadline, it gives running jobs back to the
    queue.
    """

    asked: threading.Event = field(default_factory=threading.Event)
    deadline: float | None = None  # on the clock of time.monotonic

    def ask(self, drain_s: float) -> None:
        """Ask the worker to stop within `drain_s` seconds. A second call asks it to stop at once."""
        self.deadline = time.monotonic() + (0.0 if self.asked.is_set() else drain_s)
        self.asked.set()

    def is_due(self) -> bool:
        """Return whether running jobs must be given back now."""
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Runner of claims in child processes. Each thread that calls `run` runs one claim at a time.

    On Linux, the child process is killed when the thread that started it ends, even if the other threads go
    on. The thread therefore waits in `run` until the child has ended.
    """

    db: Database
    settings: WorkerSettings
    shutdown: Shutdown
    child_command: Sequence[str] = CHILD_COMMAND

    def run_next(self, worker: str) -> bool:
        """Claim the next job and run it. Return whether there was one."""
        with self.db.write() as session:
            # A worker of an older version must not work on a migrated database.
            check_newest(session)
            claim = claims.claim(session, worker=worker, lease_s=self.settings.lease_s)
        if claim is not None:
            self.run(claim)
        return claim is not None

    def run(self, claim: Claim) -> None:
        """Run one attempt to its end. When this returns, the child is dead."""
        begun = time.monotonic()
        with watching(claim.job_id, Trace.parse(claim.traceparent)):
            self._attempt(claim)
        ATTEMPT_S.labels(claim.kind, self._state_after(claim)).observe(time.monotonic() - begun)

    def _attempt(self, claim: Claim) -> None:
        with subprocess.Popen(
            self.child_command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=self._environment()
        ) as child:
            tail: deque[str] = deque(maxlen=_TAIL_LINES)
            reader = threading.Thread(target=_copy_lines, args=(child.stderr, tail), daemon=True)
            reader.start()
            try:
                self._hand_over(child, claim)
                self._watch(child, claim)
            finally:
                # `kill` on a child that has ended does nothing.
                child.kill()
                child.wait()
                with suppress(BrokenPipeError):  # the pipe still buffers what the child did not read
                    cast("IO[bytes]", child.stdin).close()
                reader.join(timeout=5)
        self._record_exit(claim, child.returncode, tail)

    def _state_after(self, claim: Claim) -> str:
        with suppress(DBAPIError), self.db.read() as session:
            return claims.state_after(session, claim)
        return "unknown"

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, **_QUIET}
        if self.settings.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self.settings.threads)
        elif (limit := processor_limit()) is not None:
            # Libraries start a thread for each processor of the machine, whatever a container is allowed.
            environment.setdefault("OMP_NUM_THREADS", str(limit))
        return environment

    def _hand_over(self, child: "subprocess.Popen[bytes]", claim: Claim) -> None:
        pipe = cast("IO[bytes]", child.stdin)
        with suppress(BrokenPipeError):  # the child has died already, and `_record_exit` records this
            pipe.write(encode_handover(claim, self.settings))
            pipe.flush()

    def _watch(self, child: "subprocess.Popen[bytes]", claim: Claim) -> None:
        # Renew after a third of the lease. If the database fails then, each poll tries again, until the lease
        # has expired.
        renew_every_s = self.settings.lease_s / 3
        renewed_at = time.monotonic()
        kill_at: float | None = None
        while not _exited(child, self.settings.poll_s):
            at = time.monotonic()
            try:
                cancel = self._renew_and_read_cancel(claim, renew=at - renewed_at >= renew_every_s)
            except StaleClaimError as exc:
                # Usually the child has just published its result and is about to exit.
                if not _exited(child, _LAST_WORDS_S) and self._state_after(claim) not in _TOLD_BY_CHILD:
                    LEASES_LOST.labels(claim.kind).inc()
                    _log.warning("lost %s: %s", claim.job_id, exc)
                return
            except DBAPIError as exc:
                _log.warning("the database cannot be used: %s", exc)
                # When the lease has expired, another worker may have the job, so this attempt ends. At the
                # deadline of a shutdown it ends, too, and its lease expires later.
                if at - renewed_at >= self.settings.lease_s or self.shutdown.is_due():
                    return
                continue
            if at - renewed_at >= renew_every_s:
                renewed_at = at
            if cancel and kill_at is None:
                kill_at = at + CANCEL_GRACE_S
            if kill_at is not None and at >= kill_at:
                self._end(child, claim, cancelled=True)
                return
            if self.shutdown.is_due():
                self._end(child, claim, cancelled=False)
                return

    def _renew_and_read_cancel(self, claim: Claim, *, renew: bool) -> bool:
        if renew:
            with self.db.write() as session:
                return claims.renew(session, claim, lease_s=self.settings.lease_s) is not None
        with self.db.read() as session:
            return claims.is_cancel_requested(session, claim)

    def _end(self, child: "subprocess.Popen[bytes]", claim: Claim, *, cancelled: bool) -> None:
        child.kill()
        child.wait()
        with suppress(StaleClaimError), self.db.write() as session:
            (claims.cancelled if cancelled else claims.release)(session, claim)

    def _record_exit(self, claim: Claim, code: int, tail: Sequence[str]) -> None:
        """Record the failure of an attempt whose child crashed or was killed.

        If the child has recorded its own outcome, the claim is stale and nothing is written.
        """
        message = f"the job's process ended with {_exit_words(code)} before the job did"
        error = {"type": "WorkerCrashed", "message": message, "stderr": "".join(tail)[-4000:]}
        try:
            with self.db.write() as session:
                claims.fail(session, claim, error=error, retryable=True)
            _log.warning("%s: %s", claim.job_id, message)
        except StaleClaimError:
            _log.info("%s ended", claim.job_id)
        except DBAPIError as exc:
            _log.warning("the database cannot be used, so the lease of %s will expire: %s", claim.job_id, exc)


def _exited(child: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _copy_lines(pipe: BinaryIO | None, tail: deque[str]) -> None:
    for line in pipe or ():
        text = line.decode(errors="replace")
        tail.append(text)
        # Copy the log of the child to the log of the worker.
        sys.stderr.write(text)


def _exit_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
