"""Signed metadata of the service, by The Update Framework (TUF).

Trust begins at one root, whose digest is in the invitation. python-tuf's client follows newer roots, then the
timestamp, the snapshot and the roles that sign releases. It refuses metadata that is unsigned, expired or
older than metadata seen before, or whose length or digest is not the signed one. Accepted metadata is kept in
a folder, so that older metadata is refused even after a restart.

Two behaviours differ from python-tuf:

- Files are synced to the disk. Otherwise a power loss could restore older metadata.
- Only status 404 means that there is no newer root. python-tuf also accepts 403, the status for a revoked
  device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

from tuf.api.exceptions import (
    BadVersionNumberError,
    DownloadHTTPError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    RepositoryError,
    UnsignedMetadataError,
)
from tuf.api.metadata import TargetFile
from tuf.ngclient import FetcherInterface, Updater

from permille.errors import OperatorError, PackageError
from permille.files import fsync_folder, write_atomic
from permille_agent.link.client import JSON_LIMIT_BYTES, RequestRefusedError, ServiceUnavailableError

METADATA_URL = "/v1/trust/metadata/"
TARGETS_URL = "/v1/trust/targets/"

# Takes a path or URL and a limit of bytes. Returns the content of the file.
Read = Callable[[str, int], bytes]


class TrustedReleases:
    """Signed metadata about the service's files.

    For example:

        trusted = TrustedReleases(home.trust, enrolment.root.encode(), api.signed_file)
        target = trusted.find("releases/assistant/3.json")

    Args:
        folder: folder for accepted metadata, created if missing.
        root: root metadata from the enrolment.
        read: reads a file of the service.

    Raises:
        PackageError: `root` is not signed root metadata (`trust-malformed`).
        OperatorError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        root: bytes,
        read: Read,
        *,
        metadata_url: str = METADATA_URL,
        targets_url: str = TARGETS_URL,
    ) -> None:
        with _in_our_words(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = folder
            self._updater = _DurableUpdater(
                str(folder),
                metadata_url,
                target_base_url=targets_url,
                fetcher=_Fetcher(read),
                # python-tuf starts from this root each time, so a changed file on the disk cannot replace it.
                bootstrap=root,
            )

    def refresh(self) -> None:
        """Update the metadata of root, timestamp, snapshot and top-level targets. `find` also does this.

        Raises:
            PackageError: `trust-signature`, `trust-rollback`, `trust-expired`, `trust-digest` or
                `trust-malformed`.
            ServiceUnavailableError: the service cannot be reached, or lacks a signed file.
            OperatorError: the service refuses this device or a file, or the folder cannot be written.
        """
        with _in_our_words(self._folder):
            self._updater.refresh()

    def find(self, path: str) -> TargetFile | None:
        """Return the signed entry of a path, or None if it is not listed.

        Raises:
            As for `refresh`.
        """
        with _in_our_words(self._folder):
            return self._updater.get_targetinfo(path)

    def download(self, target: TargetFile, path: Path) -> None:
        """Download a target to the file `path`, unless the file already has its digest.

        Raises:
            As for `refresh`.
        """
        with _in_our_words(self._folder):
            if self._updater.find_cached_target(target, str(path)) is None:
                self._updater.download_target(target, str(path))


class _Fetcher(FetcherInterface):
    """Fetcher for python-tuf that calls `read`."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def _fetch(self, url: str) -> Iterator[bytes]:
        yield self._read_file(url, JSON_LIMIT_BYTES)

    @contextmanager
    def download_file(self, url: str, max_length: int) -> Iterator[BytesIO]:
        """Yield the content of a file, which may have at most `max_length` bytes."""
        yield BytesIO(self._read_file(url, max_length))

    def _read_file(self, url: str, limit_bytes: int) -> bytes:
        try:
            return self._read(url, limit_bytes)
        except RequestRefusedError as exc:
            if exc.status != 404:
                raise
            # python-tuf looks for the next root until it meets a 404.
            raise DownloadHTTPError(str(exc), 404) from exc


class _DurableUpdater(Updater):
    """python-tuf's client with files that survive a power loss."""

    def _persist_file(self, filename: str, data: bytes) -> None:
        write_atomic(Path(filename), data, mode=0o600)

    def _update_root_symlink(self) -> None:
        super()._update_root_symlink()
        fsync_folder(Path(self._dir))


@contextmanager
def _in_our_words(folder: Path) -> Iterator[None]:
    """Convert the errors of python-tuf to those of this package."""
    try:
        yield
    except ExpiredMetadataError as exc:
        clock = f"The clock of this device says {datetime.now(UTC):%F %H:%M} UTC. The installed package stays"
        raise PackageError("trust-expired", f"The signed metadata has expired: {exc}. {clock}") from exc
    except BadVersionNumberError as exc:
        raise PackageError(
            "trust-rollback", f"The signed metadata is older than this device has seen: {exc}"
        ) from exc
    except UnsignedMetadataError as exc:
        raise PackageError(
            "trust-signature", f"The metadata is not signed by the keys of its role: {exc}"
        ) from exc
    except LengthOrHashMismatchError as exc:
        raise PackageError("trust-digest", f"The bytes differ from the signed ones: {exc}") from exc
    # The base class of the errors above, so it must come after them.
    except RepositoryError as exc:
        raise PackageError("trust-malformed", f"The signed metadata is malformed: {exc}"[:500]) from exc
    except DownloadHTTPError as exc:
        raise ServiceUnavailableError(f"The service lacks a signed file: {exc}") from exc
    except RequestRefusedError as exc:
        raise OperatorError(f"The service refuses to send a signed file: {exc}") from exc
    except OSError as exc:
        raise OperatorError(f"Cannot write {folder}: {exc}") from exc
