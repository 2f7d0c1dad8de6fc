"""From an alias to an installed package: ask, believe nothing, download what is missing, switch.

Order: signed release -> signature by a pinned key, name, expiry, version -> manifest by its digest -> plan
against the disk -> blobs -> the package as a whole -> installed. Each step leaves a state from which the next
`pull` goes on, so a kill at any moment costs at most the bytes that were in flight. The active
personalisation is never touched: it keeps its own package until training on the new one beats it.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from permille.errors import OperatorError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.manifest import Manifest
from permille.package.plan import DownloadPlan, check_plan
from permille.package.reader import Package
from permille.package.signing import Release, signed_release_from_json, verify_release
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import RequestRefusedError
from permille_agent.link.download import Download
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.install import install
from permille_agent.state.home import Home
from permille_agent.state.models import (
    DAMAGED,
    AcceptedVersion,
    InstalledRelease,
    installed_release,
    read_releases,
    record_accepted,
    referenced_models,
)

STALE_S = 3600.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What a `pull` did.

    Attributes:
        changed: whether another package is installed than before.
        download_bytes: what had to be fetched; 0 where all was here.
        collected_bytes: what old packages gave back.
    """

    release: InstalledRelease
    changed: bool
    download_bytes: int
    package_bytes: int
    collected_bytes: int


def pull(
    home: Home,
    api: DeviceApi,
    enrolment: Enrolment,
    *,
    now_s: float,
    progress: Progress = lambda _done, _total: None,
) -> Pulled:
    """Install the package that the device's alias points at; the caller holds the writers' lock.

    Args:
        now_s: Unix time, against which the release's expiry is held.
        progress: called with bytes that are here and bytes of the download.

    Raises:
        PackageError: the release or the package is refused; what was installed stays.
        OperatorError: too little disk, or no such release.
        RetryableError: the service cannot be reached; the download goes on next time.
    """
    blobs = BlobFolder(home.blobs)
    release = _accept_release(home, api, enrolment, now_s)
    try:
        plan = _plan(home, api, blobs, release.manifest_digest)
        _download(home, api, blobs, plan, release.manifest_digest, progress)
    except RequestRefusedError as exc:
        raise OperatorError(f"expected the files of {release.name} {release.version}: {exc}") from exc
    installed = InstalledRelease(
        name=release.name, version=release.version, manifest_digest=release.manifest_digest
    )
    before = installed_release(home)
    _install(home, blobs, installed, plan.package_bytes)
    return Pulled(
        release=installed,
        changed=before is None or before.manifest_digest != installed.manifest_digest,
        download_bytes=plan.download_bytes,
        package_bytes=plan.package_bytes,
        collected_bytes=collect_garbage(home, now_s=now_s),
    )


def collect_garbage(home: Home, *, now_s: float) -> int:
    """Delete blobs and partial downloads that no package in use needs; returns the bytes given back.

    In use is what `packages_in_use` tells. Where a manifest among it cannot be read, nothing is deleted.
    """
    blobs = BlobFolder(home.blobs)
    needed: set[str] = set()
    try:
        for digest in sorted(packages_in_use(home)):
            if blobs.has(digest):
                manifest = Manifest.from_bytes(blobs.read(digest, limit=MAX_MANIFEST_BYTES))
                needed |= {digest, *(layer.digest for layer in manifest.layers)}
    except (PackageError, OSError):
        return 0
    freed = 0
    for digest in list(blobs.iterate()):
        if digest not in needed:
            freed += blobs.size(digest)
            blobs.delete(digest)
    blobs.sweep(before_s=now_s - STALE_S)
    _sweep_temporary(home, before_s=now_s - STALE_S)
    return freed + _clear_partial(home)


def packages_in_use(home: Home) -> set[str]:
    """Digests of packages that are installed, being downloaded, active, or can be gone back to."""
    releases = read_releases(home)
    used = {accepted.manifest_digest for accepted in releases.last_versions.values()}
    used |= {model.package for model in referenced_models(home)}
    return used | {kept.manifest_digest for kept in (releases.installed, releases.previous) if kept}


def _accept_release(home: Home, api: DeviceApi, enrolment: Enrolment, now_s: float) -> Release:
    name = enrolment.release
    last = read_releases(home).last_versions.get(name)
    try:
        answer = api.release(name, enrolment.alias)
    except RequestRefusedError as exc:
        raise OperatorError(
            f"expected a published release {name!r} with alias {enrolment.alias!r}: {exc}"
        ) from exc
    release = verify_release(
        signed_release_from_json(answer.model_dump()),
        {key.key_id: key.raw for key in enrolment.signing_keys},
        int(now_s),
        last.version if last else None,
        name=name,
        last_digest=last.manifest_digest if last else None,
    )
    if answer.yanked:
        raise PackageError(
            "release-yanked", f"expected a release that stands, {name} {release.version} is withdrawn"
        )
    accepted = AcceptedVersion(version=release.version, manifest_digest=release.manifest_digest)
    if last is None or last.version != release.version:
        record_accepted(home, name, accepted)
    return release


def _plan(home: Home, api: DeviceApi, blobs: BlobFolder, package_digest: str) -> DownloadPlan:
    try:
        manifest = blobs.read(package_digest, limit=MAX_MANIFEST_BYTES)
    except PackageError:
        manifest = api.manifest(package_digest)
    plan = check_plan(manifest, package_digest, _free_bytes(home), present=set(blobs.iterate()))
    if not blobs.has(package_digest):
        try:
            blobs.put_bytes(manifest, expected=package_digest)
        except OSError as exc:
            raise OperatorError(f"expected to write {home.blobs}: {exc}") from exc
    return plan


def _download(
    home: Home, api: DeviceApi, blobs: BlobFolder, plan: DownloadPlan, package_digest: str, progress: Progress
) -> None:
    done = 0

    def advance(added: int) -> None:
        nonlocal done
        done += added
        progress(done, plan.download_bytes)

    for layer in plan.layers:
        Download(
            api,
            blobs,
            home.partial,
            package_digest=package_digest,
            digest=layer.digest,
            size_bytes=layer.size_bytes,
            progress=advance,
        ).run()


def _install(home: Home, blobs: BlobFolder, release: InstalledRelease, package_bytes: int) -> None:
    """Open the package and install it. A blob that went bad on the disk is dropped, to be fetched again."""
    try:
        Package.open(blobs, release.manifest_digest)
        install(home, release, size_bytes=package_bytes)
    except PackageError as exc:
        if exc.code in DAMAGED:
            _drop_damaged(blobs, release.manifest_digest)
        raise


def _drop_damaged(blobs: BlobFolder, package_digest: str) -> None:
    manifest = Manifest.from_bytes(blobs.read(package_digest, limit=MAX_MANIFEST_BYTES))
    for layer in manifest.layers:
        try:
            blobs.check(layer.digest)
        except PackageError:
            blobs.delete(layer.digest)


def _free_bytes(home: Home) -> int:
    """Free bytes of the disk, those included that unfinished downloads hold already."""
    try:
        partial = sum(path.stat().st_size for path in home.partial.iterdir())
        return shutil.disk_usage(home.root).free + partial
    except OSError as exc:
        raise OperatorError(f"expected to learn the free space of {home.root}: {exc}") from exc


def _sweep_temporary(home: Home, *, before_s: float) -> None:
    """Remove what a kill in the middle of an atomic write left beside its target."""
    for folder in (home.root, home.reports, home.partial):
        for path in folder.glob(".*.tmp"):
            if path.stat().st_mtime < before_s:
                path.unlink()


def _clear_partial(home: Home) -> int:
    freed = 0
    for path in home.partial.iterdir():
        freed += path.stat().st_size
        path.unlink()
    return freed
