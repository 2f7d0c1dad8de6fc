"""Which model is in use: a package, and the run whose state personalises it, or none for the base.

`current.json` holds the active model and the history that `rollback` goes back through, in one file, so that
they change together. Nothing here deletes a package or a run, so every step back is possible as long as those
are kept. Whoever calls a function that writes holds the writers' lock.
"""

from dataclasses import dataclass
from typing import Any

from permille.errors import InputError, OperatorError, RetryableError
from permille_agent.state.home import Home, read_state, write_state
from permille_agent.state.releases import installed_release

MAX_HISTORY = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """A model in use.

    Attributes:
        package: digest of the package.
        run: folder name of the run below `runs/`; None is the base model.
    """

    package: str
    run: str | None = None


def active_model(home: Home) -> Active | None:
    """The model in use: the personalised one that was activated, else the installed package's base.

    A base has nothing to lose, so a newer package replaces it as soon as it is installed. None before the
    first `pull`.
    """
    state = _read(home)
    stored = None if state["active"] is None else _active(home, state["active"])
    if stored is not None and stored.run is not None:
        return stored
    installed = installed_release(home)
    return stored if installed is None else Active(package=installed.manifest_digest)


def history(home: Home) -> tuple[Active, ...]:
    """What was active before, the latest last."""
    return tuple(_active(home, entry) for entry in _read(home)["history"])


def activate(home: Home, new: Active, *, expected: Active | None) -> None:
    """Make `new` the active model; doing it twice changes nothing.

    Args:
        home: the home folder.
        new: what to activate.
        expected: what is thought to be active. A decision that was made against another model is not carried
            out.

    Raises:
        RetryableError: something else is active by now.
    """
    now = active_model(home)
    if now == new:
        _write(home, new, history(home))
        return
    if now != expected:
        raise RetryableError(
            f"expected {_words(expected)} to be active still, {_words(now)} is: run it again"
        )
    _write(home, new, (*history(home), *(() if now is None else (now,))))


def rollback(home: Home) -> Active:
    """Go back to what was active before, and return it.

    Raises:
        InputError: nothing was active before.
    """
    before = history(home)
    if not before:
        raise InputError("expected an earlier model to go back to, there is none")
    _write(home, before[-1], before[:-1])
    return before[-1]


def reset(home: Home) -> Active:
    """Go back to the base model of the installed package; the personalised one stays in the history.

    Raises:
        InputError: no package is installed and none is active.
    """
    now = active_model(home)
    installed = installed_release(home)
    if installed is not None:
        base = Active(package=installed.manifest_digest)
    elif now is not None:
        base = Active(package=now.package)
    else:
        raise InputError("expected an installed package, found none: run `permille-agent pull`")
    activate(home, base, expected=now)
    return base


def referenced_packages(home: Home) -> set[str]:
    """Digests of the packages that are active or can be rolled back to: they are not to be deleted."""
    now = active_model(home)
    return {entry.package for entry in (*history(home), *(() if now is None else (now,)))}


def referenced_runs(home: Home) -> set[str]:
    """Names of the runs that are active or can be rolled back to."""
    now = active_model(home)
    entries = (*history(home), *(() if now is None else (now,)))
    return {entry.run for entry in entries if entry.run is not None}


def _read(home: Home) -> dict[str, Any]:
    state = read_state(home.current) or {}
    return {"active": state.get("active"), "history": state.get("history", [])}


def _write(home: Home, active: Active, before: tuple[Active, ...]) -> None:
    write_state(
        home.current,
        {"active": _entry(active), "history": [_entry(entry) for entry in before[-MAX_HISTORY:]]},
    )


def _entry(active: Active) -> dict[str, str | None]:
    return {"package": active.package, "run": active.run}


def _active(home: Home, entry: Any) -> Active:
    try:
        return Active(package=entry["package"], run=entry["run"])
    except (TypeError, KeyError) as exc:
        raise OperatorError(f"expected package and run in {home.current}, got {entry!r}") from exc


def _words(active: Active | None) -> str:
    if active is None:
        return "no model"
    return f"the base of {active.package}" if active.run is None else f"run {active.run} on {active.package}"
