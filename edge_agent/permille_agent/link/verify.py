"""Detection and repair of damaged packages on this disk.

Callers are `permille-agent verify`, the daemon once a day, and `pull` if a package does not open.

- Small blobs are hashed as a whole, and big layers by blocks of 1 MiB (FORMAT 4.7).
- A damaged small blob is downloaded again. For a big layer, only the damaged blocks are downloaded.
- Blocks are written in place, so that processes that have mapped the file see the repair.
- Bytes are written only after their hash was checked.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from permille.errors import OperatorError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.blocks import Block, damaged_blocks, mend_block, package_blocks
from permille.package.limits import BLOCKED_ROLES, MAX_MANIFEST_BYTES, Role
from permille.package.manifest import Layer, Manifest
from permille_agent.link.api import BlobSource, DeviceApi
from permille_agent.link.client import RequestRefusedError
from permille_agent.link.download import Download
from permille_agent.link.extension import agent_extensions, blob_source
from permille_agent.state.home import Home
from permille_agent.state.models import read_releases, referenced_models


@dataclass(slots=True)
class Verified:
    """Result of a verification.

    Attributes:
        packages: number of verified packages.
        damaged: one text for each damaged blob or block.
        left: damage that was not repaired, with the reason if a repair failed.
        fetched_bytes: number of bytes downloaded for repairs.
    """

    packages: int = 0
    damaged: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    fetched_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Damage:
    """A damaged blob or block. `mend` repairs it and returns the number of downloaded bytes."""

    what: str
    mend: Callable[[BlobSource], int]


def verify(home: Home, api: DeviceApi | None = None) -> Verified:
    """Verify all packages in use, and repair damage if `api` is given. The caller holds the writers' lock.

    For example, without a repair:

        damaged = verify(home).damaged

    Raises:
        RetryableError: the service cannot be reached.
        OperatorError: the disk cannot be read or written.
    """
    result = Verified()
    for digest in sorted(packages_in_use(home)):
        verify_package_files(home, digest, api, result)
    return result


def packages_in_use(home: Home) -> set[str]:
    """Return the digests of all packages that are installed, active, or kept for a rollback or extension."""
    releases = read_releases(home)
    used = {model.package for model in referenced_models(home)}
    used |= {kept.manifest_digest for kept in (releases.installed, releases.previous) if kept}
    return used.union(*(extension.packages(home) for extension in agent_extensions()))


def verify_package_files(home: Home, package_digest: str, api: DeviceApi | None, result: Verified) -> None:
    """Verify one package, add the damage to `result`, and repair it if `api` is given.

    Raises:
        RetryableError: the service cannot be reached.
        OperatorError: the disk cannot be read or written.
    """
    result.packages += 1
    try:
        with blob_source(home, api) if api else nullcontext() as source:
            for damage in _Package(BlobFolder(home.blobs), home.partial, package_digest).damages():
                _mend(damage, source, result)
    except OSError as exc:
        raise OperatorError(f"Cannot read or write {home.blobs}: {exc}") from exc


def _mend(damage: _Damage, source: BlobSource | None, result: Verified) -> None:
    result.damaged.append(damage.what)
    if source is None:
        result.left.append(damage.what)
        return
    try:
        result.fetched_bytes += damage.mend(source)
    except (PackageError, RequestRefusedError) as exc:
        result.left.append(f"{damage.what}: {exc}")


class _Package:
    """Files of a package on the disk."""

    def __init__(self, blobs: BlobFolder, partial: Path, digest: str) -> None:
        self._blobs = blobs
        self._partial = partial
        self._digest = digest

    def damages(self) -> Iterator[_Damage]:
        """Yield all damage in the order of repair.

        A caller that repairs must repair each item before it takes the next one, because later checks read
        the repaired files.
        """
        if not self._is_whole(self._digest):
            yield _Damage(what=f"manifest {self._digest}", mend=self._fetch_manifest)
        # If the manifest is still damaged, nothing says which blobs belong to the package.
        if not self._is_whole(self._digest):
            return
        manifest = Manifest.from_bytes(self._blobs.read(self._digest, limit=MAX_MANIFEST_BYTES))
        for layer in manifest.layers:
            if layer.role is Role.PROGRAM and not self._blobs.has(layer.digest):
                continue  # FORMAT 4.11: a program is optional, and was not downloaded
            if layer.role not in BLOCKED_ROLES and not self._is_whole(layer.digest):
                yield self._whole(layer)
        try:
            blocks = package_blocks(self._blobs, manifest)
        except PackageError:
            return
        for layer in (manifest.layer(role) for role in BLOCKED_ROLES):
            yield from self._big(layer, [block for block in blocks if block.layer == layer])

    def _big(self, layer: Layer, blocks: list[Block]) -> Iterator[_Damage]:
        # A file that is too short is repaired by blocks, because only its last blocks are missing.
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

    def _fetch_manifest(self, source: BlobSource) -> int:
        data = source.manifest(self._digest)
        self._blobs.put_bytes(data, expected=self._digest)
        return len(data)

    def _fetch_blob(self, source: BlobSource, layer: Layer) -> int:
        self._blobs.delete(layer.digest)
        Download(
            source,
            self._blobs,
            self._partial,
            package_digest=self._digest,
            digest=layer.digest,
            size_bytes=layer.size_bytes,
        ).run()
        return layer.size_bytes

    def _fetch_block(self, source: BlobSource, block: Block) -> int:
        # `mend_block` checks the block against its hash in the package before it writes.
        data = source.blob_range(self._digest, block.layer.digest, block.begin, block.end)
        mend_block(self._blobs, block, data)
        return len(data)
