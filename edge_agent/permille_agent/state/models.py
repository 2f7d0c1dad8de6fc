"""Installed package and active model of this device.

`releases.json` holds the package that is installed. `current.json` holds the active model and the
history that `rollback` goes back through, in one file, so that they change together.

Nothing here deletes a package or a run, so every step back is possible as long as those are kept. Whoever
calls a function that writes holds the writers' lock.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from permille.errors import InputError, OperatorError, PackageError, RetryableError
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_MANIFEST_BYTES, Role
from permille.package.manifest import Manifest
from permille.trust.roles import Training
from permille_agent.state.home import Home, read_record, write_record
from permille_agent.state.lock import LockedError, hold_lock

MAX_HISTORY = 20
# Codes that say that bytes on this disk are not what was downloaded: fetching them again helps.
DAMAGED = ("blob-missing", "blob-size", "blob-digest", "block-digest")
NOTHING_INSTALLED = (
    "No package is installed. Run `permille-agent pull`. For a model that `permille personalise` made, give "
    "the --home that it printed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledRelease:
    """A release whose package is complete and verified in the blob folder.

    Attributes:
        name: the release's name.
        version: its version; an operator may point back to an earlier one.
        manifest_digest: digest of the package's manifest; the package is opened by it.
        training: what it asks of training, as it is signed.
    """

    name: str
    version: int
    manifest_digest: str
    training: Training = field(default_factory=Training)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPackage:
    """A package that was installed, did not open, and is not installed again; another version may be."""

    manifest_digest: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """Contents of `releases.json`.

    Attributes:
        installed: the release in use.
        previous: the one before it, kept until `installed` was opened for use the first time.
        refused: the package that was taken back last.
    """

    installed: InstalledRelease | None = None
    previous: InstalledRelease | None = None
    refused: RefusedPackage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """A model in use.

    Attributes:
        package: digest of the package.
        run: folder name of the run below `runs/` whose state personalises it; None is the package's own
            model: its pooled state, or its base where it carries none.
    """

    package: str
    run: str | None = None

    def __str__(self) -> str:
        """Return the name for messages."""
        return f"the base of {self.package}" if self.run is None else f"run {self.run} on {self.package}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """Contents of `current.json`: the active model and the previous ones, the latest last."""

    active: Active | None = None
    history: tuple[Active, ...] = ()


def read_releases(home: Home) -> Releases:
    """Read what is installed."""
    return read_record(home.releases, Releases) or Releases()


def installed_release(home: Home) -> InstalledRelease | None:
    """Read what is installed; None before the first `pull`."""
    return read_releases(home).installed


def training_of_release(home: Home) -> Training:
    """Read what the installed release asks of training; nothing before the first `pull`."""
    release = installed_release(home)
    return Training() if release is None else release.training


def record_installed(home: Home, release: InstalledRelease) -> None:
    """Switch to a package that is complete and was tried. The active personalisation is not touched.

    The package before stays until this one was used. Where that never was used either, the one before it
    stays.
    """
    known = read_releases(home)
    previous = known.previous or known.installed
    if previous is not None and previous.manifest_digest == release.manifest_digest:
        previous = None
    write_record(home.releases, replace(known, installed=release, previous=previous, refused=None))


@contextmanager
def opening(home: Home, package_digest: str) -> Iterator[None]:
    """Open a package for use within this block.

    Where it is the one installed last, its first success ends the keeping of the package before, and its
    refusal returns to that.

    Raises:
        RetryableError: the package was refused, the one before is installed again.
    """
    try:
        yield
    except PackageError as exc:
        if (back := _return_to_previous(home, package_digest, exc)) is None:
            raise
        raise RetryableError(
            f"The package that was installed last does not open: {exc}. {back.name} version {back.version} "
            "is installed again. Run the command again."
        ) from exc
    if _is_unused(home, package_digest):
        with suppress(LockedError), hold_lock(home, "use"):  # else the next use says so
            write_record(home.releases, replace(read_releases(home), previous=None))


def _is_unused(home: Home, package_digest: str) -> bool:
    known = read_releases(home)
    return (
        known.previous is not None
        and known.installed is not None
        and known.installed.manifest_digest == package_digest
    )


def _return_to_previous(home: Home, package_digest: str, error: PackageError) -> InstalledRelease | None:
    if not _is_unused(home, package_digest):
        return None
    try:
        with hold_lock(home, "rollback", wait_s=5.0):
            known = read_releases(home)
            refused = None
            if error.code not in DAMAGED:
                refused = RefusedPackage(manifest_digest=package_digest, reason=str(error)[:500])
            write_record(
                home.releases, replace(known, installed=known.previous, previous=None, refused=refused)
            )
    except LockedError:  # a training goes on: the caller tells what is wrong with the package, not that
        return None
    return known.previous


def active_model(home: Home) -> Active | None:
    """Find the model in use: the personalised one that was activated, else the installed package's base.

    A base has nothing to lose, so a newer package replaces it as soon as it is installed. None before the
    first `pull`.
    """
    stored = _read(home).active
    if stored is not None and stored.run is not None:
        return stored
    installed = installed_release(home)
    return stored if installed is None else Active(package=installed.manifest_digest)


def require_active(home: Home) -> Active:
    """Find the model in use.

    Raises:
        OperatorError: nothing is installed.
    """
    if (active := active_model(home)) is None:
        raise OperatorError(NOTHING_INSTALLED)
    return active


def carries_pooled(home: Home, package_digest: str) -> bool:
    """Say whether a package of this device has a pooled state; not where its manifest cannot be read."""
    try:
        return read_manifest(home, package_digest).has_layer(Role.POOLED)
    except PackageError:
        return False


def read_manifest(home: Home, package_digest: str) -> Manifest:
    """Read the manifest of a package of this device.

    Raises:
        PackageError: it is absent or damaged.
    """
    return Manifest.from_bytes(BlobFolder(home.blobs).read(package_digest, limit=MAX_MANIFEST_BYTES))


def history(home: Home) -> tuple[Active, ...]:
    """Read what was active before, the latest last."""
    return _read(home).history


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
            f"The model in use changed meanwhile: it was {expected or 'none'}, it is {now or 'none'}. Run "
            "the command again."
        )
    before = [model for model in history(home) if model not in (now, new)]
    _write(home, new, (*before, *(() if now is None else (now,))))


def rollback(home: Home) -> Active:
    """Activate the previous model, and return it.

    After the oldest one follows the model that it started from.

    So no model is lost by going back too far.

    Raises:
        InputError: nothing else was active before.
    """
    now = active_model(home)
    before = [model for model in history(home) if model != now]
    if not before:
        raise InputError("There is no earlier model to go back to.")
    _write(home, before[-1], (*(() if now is None else (now,)), *before[:-1]))
    return before[-1]


def reset(home: Home) -> Active:
    """Activate the base model of the installed package. The personal model stays in the history.

    Raises:
        InputError: no package is installed and none is active.
    """
    now, installed = active_model(home), installed_release(home)
    if installed is not None:
        base = Active(package=installed.manifest_digest)
    elif now is not None:
        base = Active(package=now.package)
    else:
        raise InputError(NOTHING_INSTALLED)
    activate(home, base, expected=now)
    return base


def referenced_models(home: Home) -> tuple[Active, ...]:
    """List the models that are active or can be rolled back to: their packages and runs are kept."""
    now = active_model(home)
    return (*history(home), *(() if now is None else (now,)))


def _read(home: Home) -> Current:
    return read_record(home.current, Current) or Current()


def _write(home: Home, active: Active, before: tuple[Active, ...]) -> None:
    write_record(home.current, Current(active=active, history=before[-MAX_HISTORY:]))
