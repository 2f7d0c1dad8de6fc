"""Pull of the package that an alias or an extension names.

Steps:

1. Refresh the signed metadata.
2. Choose the version. An extension may name one, such as a rollout whose wave is open. Otherwise, take the
   version of the alias.
3. Fetch the manifest by its signed digest, and compare the size of the missing blobs with the free space.
4. Download the missing blobs, verify the package as a whole, and install it.

The alias is the operator's unsigned choice among the signed versions, so it may return to an earlier one.
After a kill, the next `pull` continues the download. The active personal model keeps its own package
until a model that was trained on the new package replaces it. An ExecuTorch program is downloaded only if its
runtime is installed.
"""

import shutil
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from tuf.api.metadata import TargetFile

from permille.engines.executorch.build import programs_run_here
from permille.errors import InputError, OperatorError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_MANIFEST_BYTES, Role
from permille.package.manifest import Layer, Manifest
from permille.package.reader import Package
from permille.tokenizer_files import TextRules
from permille.trust.roles import aliases_of, target_path, training_of
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import RequestRefusedError
from permille_agent.link.download import Download
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.extension import Chosen, blob_source, version_choices
from permille_agent.link.install import install, try_package
from permille_agent.link.trust import TrustedReleases
from permille_agent.link.verify import Verified, packages_in_use, verify_package_files
from permille_agent.state.home import Home
from permille_agent.state.models import DAMAGED, InstalledRelease, installed_release

STALE_S = 3600.0  # a temporary file that is older belongs to a process that was killed
# Free space that a download leaves for the file system, partial files and the state of a run.
RESERVE_BYTES = 64 << 20
# Errors of an alias that moved after the metadata was read, for example at the end of a rollout.
_MOVED = ("release-unlisted", "release-alias")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Result of a `pull`.

    Attributes:
        changed: whether a different package is installed now.
        text_rules: the rules of the tokenizer, if they differ from those of the earlier package, else empty.
        download_bytes: size of the downloaded blobs.
        space_freed_bytes: size of the deleted blobs of old packages.
    """

    release: InstalledRelease
    changed: bool
    text_rules: str = ""
    download_bytes: int
    package_bytes: int
    space_freed_bytes: int


def pull(
    home: Home,
    api: DeviceApi,
    enrolment: Enrolment,
    *,
    now_s: float,
    progress: Progress = lambda _done, _total: None,
) -> Pulled:
    """Install the newest package for this device. The caller holds the writers' lock.

    For example:

        enrolment, _ = require_enrolment(home)
        with open_api(home) as api, hold_lock(home, "pull"):
            pulled = pull(home, api, enrolment, now_s=time.time())

    Args:
        home: the home folder.
        api: the service.
        enrolment: the device's enrolment.
        now_s: Unix time, for the choice of a version and the age of temporary files.
        progress: called with the number of bytes that were downloaded, and of all bytes to download.

    Raises:
        PackageError: the release or the package is refused. The installed package stays.
        OperatorError: the disk is too small, or there is no such release.
        RetryableError: the service cannot be reached. The next `pull` continues the download.
    """
    trusted = TrustedReleases(home.trust, enrolment.root.encode(), api.signed_file)
    asked = ((one, one.take_part(home, api, trusted, enrolment, now_s=now_s)) for one in version_choices())
    source, chosen = next((found for found in asked if found[1] is not None), (None, None))
    try:
        pulled = _pull(home, api, trusted, enrolment, chosen, progress)
    except (PackageError, OperatorError) as exc:
        if source is not None:
            source.note_failure(home, exc, now_s=now_s)
        raise
    if source is not None:
        source.note_installed(home, api)
    return replace(pulled, space_freed_bytes=collect_garbage(home, now_s=now_s))


def _pull(
    home: Home,
    api: DeviceApi,
    trusted: TrustedReleases,
    enrolment: Enrolment,
    chosen: Chosen | None,
    progress: Progress,
) -> Pulled:
    """Install the version that an extension has chosen, or else the version of the alias."""
    blobs = BlobFolder(home.blobs)
    try:
        release, target = _choose(api, trusted, enrolment, chosen)
    except PackageError as exc:
        if chosen is not None or exc.code not in _MOVED:
            raise
        # Perhaps the alias moved after the metadata was read, so read both once more.
        trusted = TrustedReleases(home.trust, enrolment.root.encode(), api.signed_file)
        release, target = _choose(api, trusted, enrolment, chosen)
    try:
        manifest = Manifest.from_bytes(_fetch_manifest(home, trusted, blobs, target, release.manifest_digest))
        # `_free_bytes` counts partial downloads as free space, so delete those that are not reused.
        _clear_partial(home, kept={blobs.path(layer.digest).name for layer in manifest.layers})
        plan = plan_download(
            manifest,
            _free_bytes(home),
            present={blob.digest for blob in blobs.entries()},
            program=programs_run_here(),
        )
        _download(home, api, blobs, plan, release.manifest_digest, progress)
    except RequestRefusedError as exc:
        raise OperatorError(f"The service lacks files of {release.name} {release.version}: {exc}") from exc
    before = installed_release(home)
    try:
        _install(home, blobs, release, plan)
    except PackageError as exc:
        if exc.code not in DAMAGED:
            # The package may be in use already, without this program. It must not use a refused program, so
            # delete the program.
            for layer in _programs(plan):
                blobs.delete(layer.digest)
            raise
        # Damage on this disk does not count against the package, so repair it and try once more.
        verify_package_files(home, release.manifest_digest, api, Verified())
        _install(home, blobs, release, plan)
    return Pulled(
        release=release,
        changed=before is None or before.manifest_digest != release.manifest_digest,
        text_rules=_changed_rules(blobs, before, release),
        download_bytes=plan.download_bytes,
        package_bytes=plan.manifest.size_bytes,
        space_freed_bytes=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadPlan:
    """The layers to download, smallest first, so that an unusable package is refused early."""

    manifest: Manifest
    layers: tuple[Layer, ...]
    download_bytes: int


def plan_download(
    manifest: Manifest, free_bytes: int, *, present: Container[str] = (), program: bool = True
) -> DownloadPlan:
    """Choose the layers to download, and compare their size with the free disk space.

    Args:
        manifest: manifest of the package.
        free_bytes: free space of the disk that holds the blobs.
        present: digests of blobs that are already on the disk.
        program: whether to download the package's ExecuTorch program.

    Raises:
        OperatorError: the disk is too small.
    """
    wanted = (layer for layer in manifest.layers if program or layer.role is not Role.PROGRAM)
    missing = {layer.digest: layer for layer in wanted if layer.digest not in present}
    layers = tuple(sorted(missing.values(), key=lambda layer: (layer.size_bytes, layer.digest)))
    download = sum(layer.size_bytes for layer in layers)
    # Without a download, a full disk does not matter.
    if download and download + RESERVE_BYTES > free_bytes:
        raise OperatorError(
            f"Not enough disk space: {download + RESERVE_BYTES} bytes needed, {free_bytes} free. Free some "
            "space and pull again."
        )
    return DownloadPlan(manifest=manifest, layers=layers, download_bytes=download)


def collect_garbage(home: Home, *, now_s: float) -> int:
    """Delete the blobs and partial downloads that no package in use needs. Return their size in bytes.

    Nothing is deleted if the manifest of a package in use cannot be read.
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
    for blob in list(blobs.entries()):
        if blob.digest not in needed:
            freed += blob.size_bytes
            blobs.delete(blob.digest)
    blobs.sweep(before_s=now_s - STALE_S)
    _sweep_temporary(home, before_s=now_s - STALE_S)
    return freed + _clear_partial(home)


def _choose(
    api: DeviceApi, trusted: TrustedReleases, enrolment: Enrolment, chosen: Chosen | None
) -> tuple[InstalledRelease, TargetFile]:
    """Return the version that an extension or the alias names, with its signed metadata."""
    name, alias = enrolment.release, enrolment.alias
    try:
        version = api.release(name, alias).version if chosen is None else chosen.version
    except RequestRefusedError as exc:
        raise OperatorError(
            f"No release {name!r} is published with the alias {alias!r}: {exc}. Ask the operator."
        ) from exc
    target = trusted.find(target_path(name, version))
    if target is None:
        raise PackageError(
            "release-unlisted",
            f"{name} {version} is not among the signed versions. It was withdrawn or is not for this device",
        )
    try:
        aliases, digest = aliases_of(target), f"sha256:{target.hashes['sha256']}"
        training = training_of(target)
    except (InputError, KeyError) as exc:
        raise PackageError(
            "release-malformed", f"The signed entry of {target.path} lacks its aliases or its SHA-256: {exc}"
        ) from exc
    if chosen is None and alias not in aliases:
        raise PackageError(
            "release-alias", f"{name} {version} is signed for {sorted(aliases)}, not for {alias!r}"
        )
    if target.length > MAX_MANIFEST_BYTES:
        got = target.length
        raise PackageError(
            "json-size", f"The manifest has {got} bytes, and at most {MAX_MANIFEST_BYTES} are accepted"
        )
    return InstalledRelease(name=name, version=version, manifest_digest=digest, training=training), target


def _fetch_manifest(
    home: Home, trusted: TrustedReleases, blobs: BlobFolder, target: TargetFile, package_digest: str
) -> bytes:
    """Return the manifest. Download it only if the blob folder has no good copy."""
    try:
        return blobs.read(package_digest, limit=MAX_MANIFEST_BYTES)
    except PackageError:
        part = home.partial / f"{blobs.path(package_digest).name}.manifest"
    trusted.download(target, part)
    try:
        blobs.adopt_file(part, package_digest)
    except OSError as exc:
        raise OperatorError(f"Cannot write {home.blobs}: {exc}") from exc
    return blobs.read(package_digest, limit=MAX_MANIFEST_BYTES)


def _download(
    home: Home, api: DeviceApi, blobs: BlobFolder, plan: DownloadPlan, package_digest: str, progress: Progress
) -> None:
    done = 0

    def advance(added: int) -> None:
        nonlocal done
        done += added
        progress(done, plan.download_bytes)

    with blob_source(home, api) as source:
        for layer in plan.layers:
            Download(
                source,
                blobs,
                home.partial,
                package_digest=package_digest,
                digest=layer.digest,
                size_bytes=layer.size_bytes,
                progress=advance,
            ).run()


def _install(home: Home, blobs: BlobFolder, release: InstalledRelease, plan: DownloadPlan) -> None:
    """Try the package and install it. A new program of an installed package is tried with the package."""
    Package.open(blobs, release.manifest_digest)
    if _programs(plan) and release == installed_release(home):
        try_package(home.blobs, release.manifest_digest, size_bytes=plan.manifest.size_bytes)
    install(home, release, size_bytes=plan.manifest.size_bytes)


def _changed_rules(blobs: BlobFolder, before: InstalledRelease | None, now: InstalledRelease) -> str:
    """Describe the rules of the new tokenizer if they differ from those of the earlier package."""
    if before is None or before.manifest_digest == now.manifest_digest:
        return ""
    try:
        old, new = (
            TextRules.read(Package.open(blobs, one.manifest_digest).file("tokenizer.json"))
            for one in (before, now)
        )
    except PackageError as exc:
        return f"the tokenizer of the earlier package cannot be read: {exc}"
    return "" if old == new else new.describe()


def _programs(plan: DownloadPlan) -> list[Layer]:
    return [layer for layer in plan.layers if layer.role is Role.PROGRAM]


def _free_bytes(home: Home) -> int:
    """Return the free space of the disk plus the size of partial downloads, which are reused."""
    try:
        partial = sum(path.stat().st_size for path in home.partial.iterdir())
        return shutil.disk_usage(home.root).free + partial
    except OSError as exc:
        raise OperatorError(f"Cannot find the free space of {home.root}: {exc}") from exc


def _sweep_temporary(home: Home, *, before_s: float) -> None:
    """Remove temporary files of atomic writes that a kill interrupted."""
    for folder in (home.root, home.reports):
        for path in folder.glob(".*.tmp"):
            if path.stat().st_mtime < before_s:
                path.unlink()


def _clear_partial(home: Home, *, kept: Container[str] = ()) -> int:
    """Delete the partial downloads except those of `kept` blobs. Return their size in bytes."""
    freed = 0
    for path in home.partial.iterdir():
        if path.stem not in kept:
            freed += path.stat().st_size
            path.unlink()
    return freed
