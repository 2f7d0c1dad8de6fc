"""Resumable downloads of blobs.

A download survives a lost connection, a kill, a full disk and wrong bytes:

- The bytes are appended to `partial/<hex>.part`. The ETag that came with the bytes is in `<hex>.etag`.
- A later attempt continues with `Range` and `If-Range`.
- A complete file is hashed, and then moved into the blob folder by one rename. So a download never puts an
  incomplete or wrong blob there.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from permille.errors import OperatorError, PackageError
from permille.files import fsync_folder, write_atomic
from permille.package.blobs import BlobFolder
from permille_agent.link.api import BlobSource
from permille_agent.link.client import AccessRefusedError, RequestRefusedError, ServiceUnavailableError
from permille_agent.link.transport import LEAST_RATE

Progress = Callable[[int], None]


class Download:
    """Download of one blob to the blob folder.

    Args:
        source: the service, or another source of blobs.
        partial: folder of unfinished downloads, on the same file system as `blobs`.
        size_bytes: size in the verified manifest. More bytes are never written.
        progress: called with the number of added bytes, which is negative if bytes are discarded.
    """

    def __init__(
        self,
        source: BlobSource,
        blobs: BlobFolder,
        partial: Path,
        *,
        package_digest: str,
        digest: str,
        size_bytes: int,
        progress: Progress = lambda _added: None,
    ) -> None:
        hexadecimal = blobs.path(digest).name
        self._source = source
        self._blobs = blobs
        self._package_digest = package_digest
        self._digest = digest
        self._size_bytes = size_bytes
        self._progress = progress
        self._part = partial / f"{hexadecimal}.part"
        self._etag = partial / f"{hexadecimal}.etag"

    def run(self) -> None:
        """Fetch the missing bytes, verify the blob, and move it into the blob folder.

        Raises:
            ServiceUnavailableError: all attempts failed without enough progress.
            AccessRefusedError, RequestRefusedError: the service refuses the device, or the request.
            PackageError: the server sent wrong bytes twice (`blob-digest` or `blob-size`).
            OperatorError: the disk is full or read-only. The downloaded bytes are kept.
        """
        if self._blobs.has(self._digest):
            return
        # Bytes of an earlier attempt count as downloaded.
        self._progress(self._stored_bytes())
        try:
            self._run()
        except OSError as exc:
            raise _storage_error(exc, self._part) from exc

    def _run(self) -> None:
        # Wrong bytes may come from a damaged partial file, so the download is tried again from its beginning.
        for last_try in (False, True):
            try:
                self._fetch()
                self._blobs.adopt_file(self._part, self._digest)
                break
            except PackageError:
                self._restart()
                if last_try:
                    raise
        self._etag.unlink(missing_ok=True)

    def _fetch(self) -> None:
        failures, since_s = 0, time.monotonic()
        refused_token = False
        # For an empty blob there are no bytes to fetch, but its file must be made.
        while (stored := self._stored_bytes()) < self._size_bytes or not self._part.exists():
            try:
                self._continue(stored)
            except AccessRefusedError:
                if refused_token:
                    raise
                # The clock of a token stands still while the device sleeps. So sign in again, but give up if
                # the new token is refused, too.
                refused_token = True
                self._source.forget_token()
            except RequestRefusedError as exc:
                if exc.status != 416:
                    raise
                raise PackageError("blob-size", self._expected(f"only {stored}")) from exc
            except ServiceUnavailableError as exc:
                # An attempt that was fast enough, including the wait before it, does not count as a failure.
                grown, now_s = self._stored_bytes() - stored, time.monotonic()
                failures = 0 if grown > LEAST_RATE * (now_s - since_s) else failures + 1
                refused_token = refused_token and grown <= 0  # bytes prove that the new token was accepted
                since_s = now_s
                wait_s = self._source.connection.wait_before_retry(failures, exc)
                if wait_s is None:
                    raise
                self._source.connection.pause(wait_s)
        if stored > self._size_bytes:
            raise PackageError("blob-size", self._expected(str(stored)))

    def _continue(self, stored: int) -> None:
        etag = self._stored_etag()
        with self._source.blob(self._package_digest, self._digest, start=stored, etag=etag) as response:
            # The server sends the whole blob if the ETag differs, or if it does not support ranges.
            if not (response.status_code == 206 and _range_start(response) == stored):
                self._restart()
                if response.status_code != 200:
                    raise ServiceUnavailableError(
                        f"The service answered {response.status_code} instead of the requested range"
                    )
            if (total := _total_bytes(response)) not in (None, self._size_bytes):
                raise PackageError("blob-size", self._expected(str(total)))
            self._keep_etag(response.headers.get("etag", ""))
            self._append(response)
        if (stored := self._stored_bytes()) < self._size_bytes:
            raise ServiceUnavailableError(self._expected(str(stored)))

    def _expected(self, got: str) -> str:
        return f"The service sent {got} instead of {self._size_bytes} bytes of {self._digest}"

    def _append(self, response: httpx.Response) -> None:
        room = self._size_bytes - self._stored_bytes()
        with self._part.open("ab") as file:
            for chunk in response.iter_raw():
                if len(chunk) > room:
                    raise PackageError("blob-size", self._expected("more bytes"))
                file.write(chunk)
                # `_stored_bytes` asks the file system, so the bytes must not wait in Python's buffer.
                file.flush()
                room -= len(chunk)
                self._progress(len(chunk))
            os.fsync(file.fileno())

    def _restart(self) -> None:
        self._progress(-self._stored_bytes())
        self._part.unlink(missing_ok=True)
        self._etag.unlink(missing_ok=True)
        # After a crash, the old bytes must not come back beside a new ETag.
        fsync_folder(self._part.parent)

    def _stored_bytes(self) -> int:
        try:
            return self._part.stat().st_size
        except FileNotFoundError:
            return 0

    def _stored_etag(self) -> str:
        try:
            return self._etag.read_text("ascii")
        except (FileNotFoundError, UnicodeDecodeError):
            return ""

    def _keep_etag(self, etag: str) -> None:
        # RFC 9110 13.1.5: If-Range needs a strong validator, and a weak one begins with W/.
        strong = etag if etag.isascii() and etag.startswith('"') and len(etag) < 200 else ""
        if strong != self._stored_etag():
            write_atomic(self._etag, strong.encode("ascii"), mode=0o600)


def _range_start(response: httpx.Response) -> int | None:
    unit, _, rest = response.headers.get("content-range", "").partition(" ")
    return _number(rest.partition("-")[0]) if unit == "bytes" else None


def _total_bytes(response: httpx.Response) -> int | None:
    """Return the size of the whole blob from the answer's headers."""
    if response.status_code == 206:
        return _number(response.headers.get("content-range", "").rpartition("/")[2])
    return _number(response.headers.get("content-length", ""))


def _number(text: str) -> int | None:
    # `isdigit` also accepts digits of other scripts, and texts of any length.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _storage_error(error: OSError, path: Path) -> OperatorError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OperatorError(
            f"The disk of {path.parent} is full. Free some space and pull again; the download is kept."
        )
    return OperatorError(f"Cannot write {path}: {error}")
