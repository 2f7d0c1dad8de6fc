"""Choices of the user: the files to learn from, and consent to share logs or states.

Files are remembered by reference and never copied. Nothing is shared until the user says so, and nothing that
a server sends is ever written here: a log or a state together with its package is the personalised model, so
sharing one is sharing personal data. Switching either off withdraws all that waits. A choice counts at once,
for a run that is under way, too; writing it needs no writers' lock. What was agreed to is known by how often
consent had been withdrawn before: a log whose number is not that of now is not sent, whatever any clock says.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from permille.errors import InputError, OperatorError
from permille_agent.state.home import Home, overwrite_record, read_record, write_record


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReferences:
    """Contents of `data.json`."""

    paths: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """Contents of `consent.json`. `withdrawals` counts how often sharing was switched off."""

    share_log: bool = False
    share_state: bool = False
    withdrawals: int = 0


def read_references(home: Home) -> tuple[Path, ...]:
    """List the files and folders that the daemon trains on, in the order in which they were added."""
    return (read_record(home.data, DataReferences) or DataReferences()).paths


def add_references(home: Home, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Add `paths` to the references, and return all of them.

    Raises:
        InputError: a path does not exist.
    """
    for path in paths:
        if not path.exists():
            raise InputError(f"There is no file or folder {path}.")
    return _write(home, [*read_references(home), *(path.absolute() for path in paths)])


def remove_references(home: Home, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Forget `paths`; the files themselves are not touched. Returns what is left.

    Raises:
        InputError: a path is not among the references.
    """
    known = read_references(home)
    wanted = {path.absolute() for path in paths}
    if missing := wanted - set(known):
        raise InputError(
            f"Never added: {', '.join(sorted(map(str, missing)))}. `permille-agent data list` shows what was."
        )
    return _write(home, [path for path in known if path not in wanted])


def read_consent(home: Home) -> Consent:
    """Read the user's choice, and which it is."""
    return read_record(home.consent, Consent) or Consent()


def set_sharing(home: Home, *, log: bool | None = None, state: bool | None = None) -> None:
    """Store the user's choice of logs or of states; durable on return.

    A file that is damaged withdraws all that was agreed to.

    Args:
        home: the home folder.
        log: share the logs of zeroth-order runs; None leaves the choice as it is.
        state: share packed states; None leaves the choice as it is.

    Raises:
        OperatorError: the disk is full, and there was no choice before.
    """
    with FileLock(home.consent.with_suffix(".lock"), timeout=10.0, mode=0o600):
        try:
            known = read_consent(home)
            withdrawals = known.withdrawals + (False in (log, state))
        except OperatorError:
            known, withdrawals = Consent(), secrets.randbits(48)  # a number that nothing was agreed under
        new = Consent(
            share_log=known.share_log if log is None else log,
            share_state=known.share_state if state is None else state,
            withdrawals=withdrawals,
        )
        overwrite_record(home.consent, new)


def _write(home: Home, paths: Iterable[Path]) -> tuple[Path, ...]:
    references = DataReferences(paths=tuple(dict.fromkeys(paths)))
    write_record(home.data, references)
    return references.paths
