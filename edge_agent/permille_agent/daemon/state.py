"""State of the daemon across restarts, in `daemon.json`. It never leaves the device."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from permille_agent.state.home import Home, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonState:
    """Contents of `daemon.json`.

    Attributes:
        day: local date of `seconds_used`.
        seconds_used: seconds of training on that day.
        trained: fingerprint of the package, the data and the adopted round of the last training that
            finished, or that failed and is not tried again.
        failures: number of failed trainings in a row.
        not_before: Unix time of the next attempt after a failure.
        waiting_for: reasons against training now.
        last_poll: time of the last successful poll.
        verified: local date of the last check for damage.
        last_outcome: outcome of the last training.
        poll_error: error of the last poll.
        training_error: error of the last training.
    """

    day: str = ""
    seconds_used: float = 0.0
    trained: str = ""
    failures: int = 0
    not_before: float = 0.0
    waiting_for: tuple[str, ...] = ()
    last_poll: str = ""
    verified: str = ""
    last_outcome: str = ""
    poll_error: str = ""
    training_error: str = ""

    def minutes_used(self, day: date) -> float:
        """Return the minutes of training on a local day. Only the last day of use is remembered."""
        return self.seconds_used / 60.0 if self.day == day.isoformat() else 0.0


def read_daemon_state(home: Home) -> DaemonState:
    """Read the state, or return the defaults if the daemon never ran."""
    return read_record(home.daemon, DaemonState) or DaemonState()


def data_fingerprint(paths: Sequence[Path]) -> str:
    """Return a hash of the names, sizes and modification times of the user's data files."""
    # The content is not hashed, because the daemon checks for new text once a minute.
    digest = hashlib.sha256()
    for path in _files(paths):
        try:
            status = path.stat()
        except OSError:
            continue
        # In a name that is not UTF-8, Python replaces bytes by surrogates. This restores the bytes.
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        # `Path.is_dir` raises if a network folder does not answer.
        if not os.path.isdir(path):  # noqa: PTH112
            yield path
            continue
        for folder, folders, names in os.walk(path):
            folders.sort()  # in place, so that `os.walk` visits the folders in this order
            yield from (Path(folder) / name for name in sorted(names))
