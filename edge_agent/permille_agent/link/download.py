"""Downloads of blobs that survive anything: a cut connection, a kill, a full disk, wrong bytes.

A blob grows in `partial/<hex>.part`; beside it, `<hex>.etag` says which representation it is a part of. What
is there is continued by `Range` and `If-Range`, whoever wrote it and however it ended. When it has the size
that the manifest names, it is hashed; then it moves into the blob folder in one rename. So a blob is either
absent or right.
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
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import AccessRefusedError, RequestRefusedError, ServiceUnavailableError
from permille_agent.link.transport import LEAST_RATE

Progress = Callable[[int], None]


class Download:
    """A blob that is being downloaded to the blob folder.

    Args:
        partial: folder of unfinished downloads, on the same file system as `blobs`.
        size_bytes: what the verified manifest says; never one byte more is written.
        progress: called with the number of bytes that were just added (negative where bytes are thrown away).
    """

    def __init__(
        self,
        api: DeviceApi,
        blobs: BlobFolder,
        partial: Path,
        *,
        package_digest: str,
        digest: str,
        size_bytes: int,
        progress: Progress = lambda _added: None,
    ) -> None:
        hexadecimal = blobs.path(digest).name
        self._api = api
        self._blobs = blobs
        self._package_digest = package_digest
        self._digest = digest
        self._size_bytes = size_bytes
        self._progress = progress
        self._part = partial / f"{hexadecimal}.part"
        self._etag = partial / f"{hexadecimal}.etag"

    def run(self) -> None:
        """Fetch what is missing, verify, and install.

        Raises:
            ServiceUnavailableError: the connection broke again and again without a byte of progress.
            PackageError: `blob-digest` or `blob-size`: the server sends other bytes, twice.
            OperatorError: the disk is full or cannot be written; what was downloaded is kept.
        """
        if self._blobs.has(self._digest):
            return
        self._progress(self._stored_bytes())
        try:
            self._run()
        except OSError as exc:
            raise _storage_error(exc, self._part) from exc

    def _run(self) -> None:
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
        while (stored := self._stored_bytes()) < self._size_bytes or not self._part.exists():
            try:
                self._continue(stored)
            except AccessRefusedError:
                if refused_token:
                    raise
                refused_token = True
                self._api.forget_token()
            except RequestRefusedError as exc:
                if exc.status != 416:
                    raise
                got = f"a service that has no byte {stored} of it"
                raise PackageError("blob-size", self._expected(got)) from exc
            except ServiceUnavailableError as exc:
                # A try that was worth its time, and the wait before it, does not count as one that failed.
                grown, now_s = self._stored_bytes() - stored, time.monotonic()
                failures = 0 if grown > LEAST_RATE * (now_s - since_s) else failures + 1
                since_s = now_s
                wait_s = self._api.connection.wait_before_retry(failures, exc)
                if wait_s is None:
                    raise
                self._api.connection.pause(wait_s)
        if stored > self._size_bytes:
            raise PackageError("blob-size", self._expected(str(stored)))

    def _continue(self, stored: int) -> None:
        etag = self._stored_etag()
        with self._api.blob(self._package_digest, self._digest, start=stored, etag=etag) as response:
            if not (response.status_code == 206 and _range_start(response) == stored):
                self._restart()
                self._expect_whole(response)
            if (total := _total_bytes(response)) not in (None, self._size_bytes):
                raise PackageError("blob-size", self._expected(f"a service that has {total}"))
            self._keep_etag(response.headers.get("etag", ""))
            self._append(response)
        if (stored := self._stored_bytes()) < self._size_bytes:
            raise ServiceUnavailableError(self._expected(str(stored)))

    def _expected(self, got: str) -> str:
        return f"The service sent {got} instead of {self._size_bytes} bytes of {self._digest}"

    def _expect_whole(self, response: httpx.Response) -> None:
        if response.status_code != 200:
            raise ServiceUnavailableError(
                f"The service answered {response.status_code} instead of the range that was asked for"
            )

    def _append(self, response: httpx.Response) -> None:
        room = self._size_bytes - self._stored_bytes()
        with self._part.open("ab") as file:
            for chunk in response.iter_raw():
                if len(chunk) > room:
                    raise PackageError("blob-size", self._expected("more"))
                file.write(chunk)
                file.flush()
                room -= len(chunk)
                self._progress(len(chunk))
            os.fsync(file.fileno())

    def _restart(self) -> None:
        self._progress(-self._stored_bytes())
        self._part.unlink(missing_ok=True)
        self._etag.unlink(missing_ok=True)
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
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _storage_error(error: OSError, path: Path) -> OperatorError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OperatorError(
            f"The disk of {path.parent} is full. Free some space and pull again; the download is kept."
        )
    return OperatorError(f"Cannot write {path}: {error}")
