"""Choices of the user: the files to learn from, and consent to share logs or states.

- Files are stored as references and not copied.
- A log or a state, together with its package, gives the personal model. So nothing is shared without consent,
  and no message of a server can change the user's consent.
- A choice takes effect at once, also for a running training. Storing it needs no writers' lock.
- Withdrawals of consent are counted. A log or state is sent only if the count is the same as when the user
  agreed.
"""

import json
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from permille.errors import InputError, OperatorError
from permille_agent.state.home import (
    Home,
    overwrite_record,
    path_of,
    read_record,
    stored_path,
    write_record,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReferences:
    """Contents of `data.json`: paths, as `stored_path` writes them."""

    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """Contents of `consent.json`.

    `withdrawals` grows by 1 each time the user chooses not to share. After damage to the file, it is random.
    """

    share_log: bool = False
    share_state: bool = False
    withdrawals: int = 0


def read_references(home: Home) -> tuple[Path, ...]:
    """Return the files and folders that the daemon trains on, in the order of their addition."""
    return tuple(map(path_of, (read_record(home.data, DataReferences) or DataReferences()).paths))


def add_references(home: Home, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Add paths to the references, and return all references.

    Raises:
        InputError: a path does not exist.
    """
    for path in paths:
        if not path.exists():
            raise InputError(f"There is no file or folder {path}.")
    return _write(home, [*read_references(home), *(path.absolute() for path in paths)])


def remove_references(home: Home, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Remove paths from the references, and return the remaining ones. The files are not changed.

    Raises:
        InputError: a path is not among the references.
    """
    known = read_references(home)
    wanted = {path.absolute() for path in paths}
    if missing := wanted - set(known):
        raise InputError(
            f"These paths were never added: {', '.join(sorted(map(str, missing)))}. Run `permille-agent data "
            "list` to see the added ones."
        )
    return _write(home, [path for path in known if path not in wanted])


def repair_references(home: Home) -> tuple[Path, ...]:
    """Write a damaged list of references again, with the paths that can still be read.

    For example, a flipped bit in one path leaves the others. A list that is not damaged stays as it is.

    Returns:
        The remaining references.

    Raises:
        OperatorError: the file cannot be read or written.
    """
    with suppress(OperatorError):
        return read_references(home)
    try:
        found = json.loads(home.data.read_bytes())["paths"]
    except (LookupError, RecursionError, TypeError, ValueError):
        found = []
    except OSError as exc:
        raise OperatorError(f"Cannot read {home.data}: {exc}") from exc
    names = found if isinstance(found, list) else []
    return _write(home, [path_of(name) for name in names if isinstance(name, str) and _is_path(name)])


def _is_path(name: str) -> bool:
    try:
        return os.fsencode(path_of(name)).startswith(b"/")
    except UnicodeEncodeError:  # half of a surrogate pair that stands for no byte
        return False


def read_consent(home: Home) -> Consent:
    """Return the user's consent. The default is not to share."""
    return read_record(home.consent, Consent) or Consent()


def set_sharing(home: Home, *, log: bool | None = None, state: bool | None = None) -> None:
    """Store the user's choices durably. A damaged file counts as a withdrawal of all consent.

    For example, `set_sharing(home, log=True)` agrees to share logs.

    Args:
        home: the home folder.
        log: whether to share the logs of zeroth-order runs. None keeps the choice.
        state: whether to share packed states. None keeps the choice.

    Raises:
        OperatorError: the file cannot be written. On a full disk, this happens only if there is no earlier
            `consent.json`, because an earlier one is overwritten in place.
    """
    with FileLock(home.consent.with_suffix(".lock"), timeout=10.0, mode=0o600):
        try:
            known = read_consent(home)
            withdrawals = known.withdrawals + (False in (log, state))
        except OperatorError:
            # The count is lost. A random count differs from the count of any earlier consent.
            known, withdrawals = Consent(), secrets.randbits(48)
        new = Consent(
            share_log=known.share_log if log is None else log,
            share_state=known.share_state if state is None else state,
            withdrawals=withdrawals,
        )
        overwrite_record(home.consent, new)


def _write(home: Home, paths: Iterable[Path]) -> tuple[Path, ...]:
    kept = tuple(dict.fromkeys(paths))
    write_record(home.data, DataReferences(paths=tuple(map(stored_path, kept))))
    return kept
