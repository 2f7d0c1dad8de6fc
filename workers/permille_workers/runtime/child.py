"""The process of one attempt: `python -m permille_workers.runtime.child`, spawned by a supervisor.

The child reads the claim from its standard input, runs the task of the job's kind, and records the outcome.
It ends when its supervisor dies. On Linux, the parent-death signal kills it. On other systems, it notices the
end of its standard input.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import BinaryIO

from sqlalchemy.exc import DBAPIError

from permille import telemetry
from permille.errors import InputError, OperatorError, PackageError, PermilleError, RetryableError
from permille.sandbox.confinement import die_with_parent
from permille.store.blobs.folder import open_blobs
from permille.store.database import Database
from permille.store.errors import BlobStoreError, StaleClaimError
from permille.store.jobs import claims
from permille.store.jobs.claims import Claim
from permille_workers.runtime.context import (
    JobCancelledError,
    PartsToAdd,
    Progress,
    Publish,
    Task,
    TaskContext,
)
from permille_workers.runtime.handover import decode_handover
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.work_folders import locked_work_folder

MAX_HANDOVER_BYTES = 16 << 20
_FINAL = (InputError, PackageError, OperatorError)  # after these errors, a retry would fail again
_PASSING_CODES = {"blob-missing", "blob-digest", "block-digest"}  # the store may return all of it next time
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # pauses between attempts to publish

_log = logging.getLogger(__name__)


def run_child(tasks: Mapping[str, Task], pipe: BinaryIO) -> None:
    """Read a claim from the supervisor's pipe, and run one attempt of it."""
    die_with_parent()
    line = pipe.readline(MAX_HANDOVER_BYTES)
    claim, settings = decode_handover(line)
    telemetry.configure_logging(settings.log_format)
    telemetry.current_job.set(claim.job_id)
    telemetry.start_tracing("permille-worker")
    # Systems without a parent-death signal notice the end of the supervisor in this way.
    threading.Thread(target=_die_at_end, args=(pipe,), daemon=True).start()
    db = Database(settings.database_url.get_secret_value())
    what: dict[str, str | int] = {"permille.job_id": claim.job_id, "permille.attempt": claim.attempt}
    try:
        with telemetry.span(f"job {claim.kind}", telemetry.Trace.parse(claim.traceparent), what):
            attempt(tasks, db, claim, settings)
    finally:
        db.close()
        telemetry.stop_tracing()


def attempt(tasks: Mapping[str, Task], db: Database, claim: Claim, settings: WorkerSettings) -> None:
    """Run the task and record its outcome: a result, parts to add, a cancellation or a failure.

    If another attempt of the job has begun, nothing is written.
    """
    try:
        task = tasks.get(claim.kind)
        if task is None:
            raise InputError(f"This worker runs {', '.join(sorted(tasks))}, but not {claim.kind!r}.")
        with locked_work_folder(settings.work_root, claim.job_id) as folder:
            context = TaskContext(
                claim=claim,
                db=db,
                blobs=open_blobs(settings),
                settings=settings,
                work_folder=folder,
                progress=Progress(db, claim),
            )
            publish_result(db, claim, task(context))
    except StaleClaimError as exc:
        _log.warning("another attempt has begun: %s", exc)
    except JobCancelledError:
        with db.write() as session:
            claims.cancelled(session, claim)
    except Exception as exc:  # noqa: BLE001 - every failure of a job is recorded as its error
        # The messages of our own errors say what to do, unless they hide a failure in the code of a library.
        usual = (PermilleError, OSError, ValueError, type(None))
        trace = None if isinstance(exc, PermilleError) and isinstance(exc.__cause__, usual) else exc
        _log.warning("attempt %d of %s failed: %s", claim.attempt, claim.job_id, exc, exc_info=trace)
        record_failure(db, claim, exc)


def publish_result(db: Database, claim: Claim, made: Publish | PartsToAdd) -> None:
    """Write the rows of the result and end the job, or add the parts that the task made, in one transaction.

    If the bucket or the database does not answer, try again after a pause, so that hours of work are not
    lost. Each try has its own transaction, so that other writers get their turn in between.

    Raises:
        StaleClaimError: another attempt has begun. Nothing is written.
        BlobStoreError, DBAPIError: the bucket or the database did not answer in any try.
    """
    for pause_s in _PAUSES_S:
        try:
            _publish(db, claim, made)
        except (BlobStoreError, DBAPIError) as exc:
            _log.warning("cannot publish yet: %s", exc)
            time.sleep(pause_s)
        else:
            return
    _publish(db, claim, made)


def _publish(db: Database, claim: Claim, made: Publish | PartsToAdd) -> None:
    with db.write() as session:
        # This locks the row of the job, so that no other attempt can take over before the commit.
        claims.check(session, claim)
        if isinstance(made, PartsToAdd):
            claims.split(session, claim, made.parts)
        else:
            claims.complete(session, claim, result_id=made(session))


def record_failure(db: Database, claim: Claim, exc: Exception) -> None:
    """End the attempt with an error. Only unexpected errors are recorded with a traceback."""
    error = {"type": type(exc).__name__, "message": str(exc) or type(exc).__name__}
    final, wait_s = is_final(exc), exc.retry_after_s if isinstance(exc, RetryableError) else None
    if not isinstance(exc, PermilleError):
        # Keep the end of the traceback, which has the line that failed.
        error["traceback"] = "".join(traceback.format_exception(exc))[-8000:]
    try:
        with db.write() as session:
            claims.fail(session, claim, error=error, retryable=not final, wait_s=wait_s)
    except StaleClaimError as stale:
        _log.warning("another attempt has begun: %s", stale)


def is_final(exc: Exception) -> bool:
    """Return whether a retry is pointless, because the input or the settings are wrong.

    An error of a full or broken disk is not final. Another worker may take the next attempt, or space may be
    freed.
    """
    if isinstance(exc, PackageError) and exc.code in _PASSING_CODES:
        return False
    return isinstance(exc, _FINAL)


def _die_at_end(pipe: BinaryIO) -> None:
    # Read from the descriptor, not from the buffered reader. A thread that blocks in the reader holds its
    # lock, which the process needs when it ends.
    while os.read(pipe.fileno(), 4096):
        pass
    # `sys.exit` would end only this thread.
    os._exit(70)


def main() -> None:
    """Run the child process."""
    from permille_workers.tasks import TASKS

    faulthandler.enable()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # after Ctrl-C, the supervisor decides what happens to the job
    run_child(TASKS, sys.stdin.buffer)


if __name__ == "__main__":
    main()
