"""Damage of the packages on this disk: found by their hashes, mended by fetching the damaged bytes alone.

Who calls it: `permille-agent verify`, the daemon once a day, and `pull` where a package that is here does
not open. What a package needs is hashed again: small
blobs whole, big layers by blocks of 1 MiB (FORMAT 4.7). A small blob that is damaged is fetched again; of a
big layer the damaged blocks are, and put back in place, so that whoever has it mapped sees them, too. Nothing
is written before its hash is right.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from permille.errors import OperatorError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.blocks import Block, damaged_blocks, mend_block, package_blocks
from permille.package.limits import BLOCKED_ROLES, MAX_MANIFEST_BYTES, Role
from permille.package.manifest import Layer, Manifest
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import RequestRefusedError
from permille_agent.link.download import Download
from permille_agent.state.home import Home
from permille_agent.state.models import read_releases, referenced_models


@dataclass(slots=True)
class Verified:
    """Result of a verification: the damage in words, and what was done about it.

    Attributes:
        packages: how many were looked at.
        damaged: what was damaged, one text a blob or block.
        left: those of `damaged` that are not mended, and why where that was tried.
        fetched_bytes: what mending took.
    """

    packages: int = 0
    damaged: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    fetched_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Damage:
    """Something damaged, and how it is fetched again; returns the number of bytes fetched."""

    what: str
    mend: Callable[[DeviceApi], int]


def verify(home: Home, api: DeviceApi | None = None) -> Verified:
    """Hash every package in use; with `api`, mend what is damaged. The caller holds the writers' lock.

    Raises:
        RetryableError: the service cannot be reached.
        OperatorError: the disk cannot be read or written.
    """
    known = read_releases(home)
    used = {model.package for model in referenced_models(home)}
    used |= {release.manifest_digest for release in (known.installed, known.previous) if release}
    result = Verified()
    for digest in sorted(used):
        verify_package_files(home, digest, api, result)
    return result


def verify_package_files(home: Home, package_digest: str, api: DeviceApi | None, result: Verified) -> None:
    """Hash the files of one package and add what was found to `result`; with `api`, mend what is damaged.

    Raises:
        RetryableError, OperatorError: as `verify`.
    """
    result.packages += 1
    try:
        for damage in _Package(BlobFolder(home.blobs), home.partial, package_digest).damages():
            _mend(damage, api, result)
    except OSError as exc:
        raise OperatorError(f"Cannot read or write {home.blobs}: {exc}") from exc


def _mend(damage: _Damage, api: DeviceApi | None, result: Verified) -> None:
    result.damaged.append(damage.what)
    if api is None:
        result.left.append(damage.what)
        return
    try:
        result.fetched_bytes += damage.mend(api)
    except (PackageError, RequestRefusedError) as exc:
        result.left.append(f"{damage.what}: {exc}")


class _Package:
    """A package on the disk."""

    def __init__(self, blobs: BlobFolder, partial: Path, digest: str) -> None:
        self._blobs = blobs
        self._partial = partial
        self._digest = digest

    def damages(self) -> Iterator[_Damage]:
        """Yield the damage in the order of repair. Each repaired item is needed to check the next."""
        if not self._is_whole(self._digest):
            yield _Damage(what=f"manifest {self._digest}", mend=self._fetch_manifest)
        if not self._is_whole(self._digest):
            return
        manifest = Manifest.from_bytes(self._blobs.read(self._digest, limit=MAX_MANIFEST_BYTES))
        for layer in manifest.layers:
            if layer.role is Role.PROGRAM and not self._blobs.has(layer.digest):
                continue  # FORMAT 4.11: it was not wanted here
            if layer.role not in BLOCKED_ROLES and not self._is_whole(layer.digest):
                yield self._whole(layer)
        try:
            blocks = package_blocks(self._blobs, manifest)
        except PackageError:
            return
        for layer in (manifest.layer(role) for role in BLOCKED_ROLES):
            yield from self._big(layer, [block for block in blocks if block.layer == layer])

    def _big(self, layer: Layer, blocks: list[Block]) -> Iterator[_Damage]:
        # One that is too short lacks its last blocks.
        if not self._blobs.has(layer.digest) or self._blobs.size(layer.digest) > layer.size_bytes:
            yield self._whole(layer)
            return
        for block in damaged_blocks(self._blobs, blocks):
            yield _Damage(what=str(block), mend=partial(self._fetch_block, block=block))

    def _whole(self, layer: Layer) -> _Damage:
        what = f"{layer.path or layer.role} {layer.digest}"
        return _Damage(what=what, mend=partial(self._fetch_blob, layer=layer))

    def _is_whole(self, digest: str) -> bool:
        try:
            self._blobs.check(digest)
        except PackageError:
            return False
        return True

    def _fetch_manifest(self, api: DeviceApi) -> int:
        data = api.manifest(self._digest)
        self._blobs.put_bytes(data, expected=self._digest)
        return len(data)

    def _fetch_blob(self, api: DeviceApi, layer: Layer) -> int:
        self._blobs.delete(layer.digest)
        Download(
            api,
            self._blobs,
            self._partial,
            package_digest=self._digest,
            digest=layer.digest,
            size_bytes=layer.size_bytes,
        ).run()
        return layer.size_bytes

    def _fetch_block(self, api: DeviceApi, block: Block) -> int:
        data = api.blob_range(self._digest, block.layer.digest, block.begin, block.end)
        mend_block(self._blobs, block, data)
        return len(data)
