"""The user's data, by reference: the agent remembers where files are and never copies them to its home."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from permille.errors import InputError
from permille_agent.state.home import Home, read_state, write_state


def read_references(home: Home) -> tuple[Path, ...]:
    """The files and folders that the daemon trains on, in the order in which they were added."""
    state = read_state(home.data) or {}
    return tuple(Path(name) for name in state.get("paths", ()))


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


def _write(home: Home, paths: Iterable[Path]) -> tuple[Path, ...]:
    unique = tuple(dict.fromkeys(paths))
    write_state(home.data, {"paths": [str(path) for path in unique]})
    return unique
