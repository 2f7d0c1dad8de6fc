"""What the user chose on this device: which files it learns from, and whether logs may be shared.

Files are remembered by reference and never copied. Logs are not shared until the user says so, and nothing
that a server sends is ever written here: a log together with its package is the personalised model, so
sharing one is sharing personal data. A choice counts at once, for a run that is under way, too; writing it
needs no lock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from permille.errors import InputError
from permille_agent.state.home import Home, read_record, write_record


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReferences:
    """What `data.json` holds."""

    paths: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """What `consent.json` holds; `changed_at_s` in Unix time."""

    share_log: bool = False
    changed_at_s: float = 0.0


def read_references(home: Home) -> tuple[Path, ...]:
    """List the files and folders that the daemon trains on, in the order in which they were added."""
    return (read_record(home.data, DataReferences) or DataReferences()).paths


def add_references(home: Home, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Remember `paths`, too; returns all references.

    Raises:
        InputError: a path does not exist.
    """
    for path in paths:
        if not path.exists():
            raise InputError(f"expected a file or folder at {path}, found none")
    return _write(home, [*read_references(home), *(path.absolute() for path in paths)])


def remove_references(home: Home, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Forget `paths`; the files themselves are not touched. Returns what is left.

    Raises:
        InputError: a path is not among the references.
    """
    known = read_references(home)
    wanted = {path.absolute() for path in paths}
    if missing := wanted - set(known):
        raise InputError(f"expected paths that were added, got {', '.join(sorted(map(str, missing)))}")
    return _write(home, [path for path in known if path not in wanted])


def shares_log(home: Home) -> bool:
    """Whether the user switched sharing on and it is on still."""
    return (read_record(home.consent, Consent) or Consent()).share_log


def set_share_log(home: Home, share: bool, *, now: datetime) -> None:
    """Store the user's choice."""
    write_record(home.consent, Consent(share_log=share, changed_at_s=now.timestamp()))


def is_withdrawn(home: Home, file: Path) -> bool:
    """Whether the user switched sharing off after `file` was written: what it stands for is then not shared.

    A run that shares its log by its own flag, begun after that, is not meant.
    """
    choice = read_record(home.consent, Consent)
    return choice is not None and not choice.share_log and choice.changed_at_s >= file.stat().st_mtime


def _write(home: Home, paths: Iterable[Path]) -> tuple[Path, ...]:
    references = DataReferences(paths=tuple(dict.fromkeys(paths)))
    write_record(home.data, references)
    return references.paths
