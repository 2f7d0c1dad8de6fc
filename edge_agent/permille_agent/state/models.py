"""Installed package and active model of this device.

`releases.json` has the installed package. `current.json` has the active model together with the history for
`rollback`, so that both change atomically. This module deletes no packages or runs. Callers of functions that
write hold the writers' lock.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from permille.errors import InputError, OperatorError, PackageError, RetryableError
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.manifest import Manifest
from permille.trust.roles import Training
from permille_agent.state.home import Home, read_record, write_record
from permille_agent.state.lock import LockedError, hold_lock

MAX_HISTORY = 20
# Codes of damage on this disk, which another download repairs.
DAMAGED = ("blob-missing", "blob-size", "blob-digest", "block-digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledRelease:
    """A release whose package is complete and verified in the blob folder.

    Attributes:
        name: the release's name.
        version: the release's version. An operator may return to an earlier one.
        manifest_digest: digest of the package's manifest.
        training: signed options of training.
    """

    name: str
    version: int
    manifest_digest: str
    training: Training = field(default_factory=Training)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPackage:
    """A package that did not open after its installation, and is not installed again."""

    manifest_digest: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """Contents of `releases.json`.

    Attributes:
        installed: the installed release.
        previous: the release to return to if `installed` does not open. It is kept until `installed` has been
            used once.
        refused: the last package that did not open.
    """

    installed: InstalledRelease | None = None
    previous: InstalledRelease | None = None
    refused: RefusedPackage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """A model in use.

    Attributes:
        package: digest of the package.
        run: folder name of the run whose state is used. None means the base of the package.
    """

    package: str
    run: str | None = None

    def __str__(self) -> str:
        """Return the name for messages."""
        return f"the base of {self.package}" if self.run is None else f"run {self.run} on {self.package}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """Contents of `current.json`: the active model and the earlier ones, the latest last."""

    active: Active | None = None
    history: tuple[Active, ...] = ()


def nothing_installed(home: Home) -> str:
    """Return the error message for a home folder without a package."""
    command = "pull" if home.enrolment.exists() else "enroll"
    return (
        f"No package is installed in {home.root}. Run `permille-agent {command}`. For a model that `permille "
        "personalise` made, give the --home that it printed."
    )


def read_releases(home: Home) -> Releases:
    """Read `releases.json`."""
    return read_record(home.releases, Releases) or Releases()


def installed_release(home: Home) -> InstalledRelease | None:
    """Return the installed release, or None before the first `pull`."""
    return read_releases(home).installed


def training_of_release(home: Home) -> Training:
    """Return the training options of the installed release."""
    release = installed_release(home)
    return Training() if release is None else release.training


def record_installed(home: Home, release: InstalledRelease) -> None:
    """Record that a package is installed, after its trial. An active personal model stays active.

    The package that was used last is kept until the new one has been used once.
    """
    known = read_releases(home)
    # If the installed package was never used, the one before it is still the last good one.
    previous = known.previous or known.installed
    if previous is not None and previous.manifest_digest == release.manifest_digest:
        previous = None
    write_record(home.releases, replace(known, installed=release, previous=previous, refused=None))


@contextmanager
def opening(home: Home, package_digest: str) -> Iterator[None]:
    """Context in which a package is opened for use.

    If a newly installed package opens, the earlier package is no longer kept. If it does not open, the
    earlier package is installed again. For example:

        with opening(home, digest):
            package = Package.open(BlobFolder(home.blobs), digest)

    Raises:
        RetryableError: the package did not open, and the earlier one is installed again.
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
        # If another process holds the lock, or the disk is full, the next use writes the record.
        with suppress(LockedError, OperatorError), hold_lock(home, "use"):
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
            # A damaged file says nothing about the package, so the package may be downloaded and tried again.
            if error.code not in DAMAGED:
                refused = RefusedPackage(manifest_digest=package_digest, reason=str(error)[:500])
            write_record(
                home.releases, replace(known, installed=known.previous, previous=None, refused=refused)
            )
    except LockedError:  # the package's own error is more useful to the user than this one
        return None
    return known.previous


def active_model(home: Home) -> Active | None:
    """Return the active model, or None before the first `pull`.

    An active personal model stays. Otherwise the newest installed package is active.
    """
    stored = _read(home).active
    if stored is not None and stored.run is not None:
        return stored
    installed = installed_release(home)
    return stored if installed is None else Active(package=installed.manifest_digest)


def require_active(home: Home) -> Active:
    """Return the active model.

    Raises:
        OperatorError: no package is installed.
    """
    if (active := active_model(home)) is None:
        raise OperatorError(nothing_installed(home))
    return active


def read_manifest(home: Home, package_digest: str) -> Manifest:
    """Read the manifest of a package on this device.

    Raises:
        PackageError: the manifest is missing or damaged.
    """
    return Manifest.from_bytes(BlobFolder(home.blobs).read(package_digest, limit=MAX_MANIFEST_BYTES))


def history(home: Home) -> tuple[Active, ...]:
    """Return the models that were active before, the latest last."""
    return _read(home).history


def activate(home: Home, new: Active, *, expected: Active | None) -> None:
    """Make `new` the active model. Repeating the call has no effect.

    Args:
        home: the home folder.
        new: model to activate.
        expected: active model at the time of the decision.

    Raises:
        RetryableError: another model is active now, so the decision is void.
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
    # Each model is in the history once, so that `rollback` does not return to the model in use.
    before = [model for model in history(home) if model not in (now, new)]
    _write(home, new, (*before, *(() if now is None else (now,))))


def rollback(home: Home) -> Active:
    """Activate the previous model, and return it.

    The model that was in use becomes the oldest of the history. So repeated rollbacks cycle through all
    models, and none is lost.

    Raises:
        InputError: no other model was active before.
    """
    now = active_model(home)
    before = [model for model in history(home) if model != now]
    if not before:
        raise InputError("There is no earlier model to go back to.")
    _write(home, before[-1], (*(() if now is None else (now,)), *before[:-1]))
    return before[-1]


def reset(home: Home) -> Active:
    """Activate the installed package without a personal model. The personal model stays in the history.

    Raises:
        InputError: no package is installed and none is active.
    """
    now, installed = active_model(home), installed_release(home)
    if installed is not None:
        base = Active(package=installed.manifest_digest)
    elif now is not None:
        base = Active(package=now.package)
    else:
        raise InputError(nothing_installed(home))
    activate(home, base, expected=now)
    return base


def referenced_models(home: Home) -> tuple[Active, ...]:
    """Return the active model and those of the history, whose packages and runs are kept."""
    now = active_model(home)
    return (*history(home), *(() if now is None else (now,)))


def _read(home: Home) -> Current:
    return read_record(home.current, Current) or Current()


def _write(home: Home, active: Active, before: tuple[Active, ...]) -> None:
    write_record(home.current, Current(active=active, history=before[-MAX_HISTORY:]))
