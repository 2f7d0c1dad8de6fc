"""Plan of a download, computed before its first byte (FORMAT 3.5)."""

from collections.abc import Container
from dataclasses import dataclass

from permille.digests import digest_of
from permille.errors import OperatorError, PackageError
from permille.package.limits import MAX_MANIFEST_BYTES, Role
from permille.package.manifest import Layer, Manifest

# Room for the file system's own needs, partial files and the state of a run.
RESERVE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadPlan:
    """The layers to fetch, smallest first: a package that cannot be opened is found out early."""

    manifest: Manifest
    layers: tuple[Layer, ...]
    download_bytes: int
    package_bytes: int


def check_plan(
    manifest_bytes: bytes,
    expected_digest: str,
    free_bytes: int,
    *,
    present: Container[str] = (),
    program: bool = True,
) -> DownloadPlan:
    """Check a manifest against its digest, its rules and the free disk.

    Args:
        free_bytes: of the disk that will hold the blobs.
        present: digests that need no download.
        program: whether a program is wanted; what does not run it does without.

    Raises:
        PackageError: `blob-digest`, or a rule of FORMAT 3.
        OperatorError: the disk is too small.
    """
    if len(manifest_bytes) > MAX_MANIFEST_BYTES:
        got = len(manifest_bytes)
        raise PackageError(
            "json-size", f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, got {got}"
        )
    if digest_of(manifest_bytes) != expected_digest:
        got_digest = digest_of(manifest_bytes)
        raise PackageError("blob-digest", f"expected a manifest {expected_digest!r:.100}, got {got_digest}")
    manifest = Manifest.from_bytes(manifest_bytes)
    wanted = (layer for layer in manifest.layers if program or layer.role is not Role.PROGRAM)
    missing = {layer.digest: layer for layer in wanted if layer.digest not in present}
    layers = tuple(sorted(missing.values(), key=lambda layer: (layer.size_bytes, layer.digest)))
    download = sum(layer.size_bytes for layer in layers)
    if download and download + RESERVE_BYTES > free_bytes:
        raise OperatorError(f"expected {download + RESERVE_BYTES} bytes of free disk, got {free_bytes}")
    return DownloadPlan(
        manifest=manifest, layers=layers, download_bytes=download, package_bytes=manifest.size_bytes
    )
