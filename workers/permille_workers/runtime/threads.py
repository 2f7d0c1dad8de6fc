"""Threads that a worker cannot do without, and the end of a worker that was asked to stop."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Final

from sqlalchemy.exc import DBAPIError

from permille.errors import PermilleError
from permille.telemetry import Outage
from permille_workers.runtime.supervisor import Shutdown

EXIT_USAGE, EXIT_RETRY = 2, 75
"""Exit statuses. 75 (EX_TEMPFAIL of sysexits.h) tells a supervisor to start the process again later."""
_LATE_S: Final = 5.0  # seconds after the deadline of a shutdown, in which jobs are given back
_LOOK_S: Final = 0.2

_log = logging.getLogger(__name__)


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread that the worker needs. If `work` raises, the process ends with `EXIT_RETRY`.

    A worker without one of its threads would live on, renew nothing and take no job. So its supervisor must
    start it again.

    Raises:
        RuntimeError: the system allows no further thread.
    """
    thread = threading.Thread(target=partial(_run, work, name), name=name, daemon=True)
    thread.start()
    return thread


def _run(work: Callable[[], object], name: str) -> None:
    try:
        work()
    except BaseException:  # noqa: BLE001 - whatever ended the thread, the worker is of no use without it
        _log.exception("the thread %s failed, so this worker ends", name)
        # `sys.exit` would end only this thread. The children end with the process, and their leases expire.
        os._exit(EXIT_RETRY)


def try_step(work: Callable[[], object], outage: Outage) -> bool:
    """Run a step that is repeated later, and return whether it succeeded. If it fails, log the failure."""
    try:
        work()
    except (DBAPIError, OSError, PermilleError) as exc:
        outage.note(exc)
        return False
    except Exception:  # noqa: BLE001 - if this thread ended, its work would wait for ever
        _log.exception("%s", outage.what)
        return False
    outage.note(None)
    return True


def end_on_signals(shutdown: Shutdown, drain_s: float) -> None:
    """Ask for a shutdown at each SIGTERM and SIGINT. The second one ends the wait for running jobs."""

    def ask(_signal: int, _frame: FrameType | None) -> None:
        shutdown.ask(drain_s)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)


def end_in_time(shutdown: Shutdown) -> None:
    """Wait for a shutdown, and end the process soon after its deadline, whatever still hangs.

    By then jobs have been given back. A call to a broker or a database that does not answer may last longer.
    """
    shutdown.asked.wait()
    while shutdown.deadline is None or time.monotonic() < shutdown.deadline + _LATE_S:
        time.sleep(_LOOK_S)
    _log.warning("this worker still waits for its broker or its database, and ends now")
    os._exit(0)
