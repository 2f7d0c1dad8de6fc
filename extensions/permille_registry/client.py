"""Client of an OCI registry for the operator's command line (OCI distribution specification 1.1).

oras-py 0.2.43 was considered. It neither resumes nor checks a download, starts each upload at its beginning,
and reads answers without a limit. So this module calls the specification's routes with httpx.

- An upload is sent in chunks. After a lost connection or a kill, the registry is asked how much it has. For
  that, the address of the unfinished upload is kept in a file.
- A registry may refuse to continue a chunk that was cut, as CNCF distribution 2.8 does. Then this blob starts
  again. Blobs that are complete are never sent again.
- A download continues its partial file. The file enters the blob folder only if its digest is right.
- The login goes to the registry's own address only, not to the target of a redirect.
"""

import json
import os
import re
import ssl
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

import httpx

from permille.addresses import is_loopback
from permille.digests import digest_of
from permille.errors import OperatorError, PackageError, RetryableError
from permille.files import write_atomic
from permille.package.blobs import BlobFolder
from permille.plain_text import printable, reason
from permille.retry_after import stated_wait_s
from permille_registry.access import TOKEN_LIMIT_BYTES, Access
from permille_registry.address import Address

CHUNK_BYTES: Final = 8 << 20
ATTEMPTS: Final = 5
_LONGEST_WAIT_S: Final = 60.0
_ANSWER_LIMIT_BYTES: Final = 64 << 10
_LATER: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_ENDED_UPLOAD: Final = frozenset({400, 404, 416})
_Read = Callable[[int, int], bytes]


class Registry:
    """One repository of a registry. Use it as a context manager.

    For example:

        with Registry(Address.parse("oci://127.0.0.1:5000/assistant"), "pull") as registry:
            manifest = registry.read(digest, limit_bytes=1 << 20)

    Args:
        actions: `pull`, or `pull,push`.
        ca_file: a file of certificates to trust besides those of the system.
        sleep: waits between attempts.
    """

    def __init__(
        self,
        address: Address,
        actions: str,
        *,
        ca_file: Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._address = address
        self._access = Access(address, actions, self._fetch_token)
        self._sleep = sleep
        context = ssl.create_default_context()
        if ca_file is not None:
            context.load_verify_locations(ca_file)
        self._http = httpx.Client(
            timeout=httpx.Timeout(60.0, connect=10.0),
            verify=context,
            trust_env=False,
            # Compressed answers could grow beyond any limit while they are decoded.
            headers={"accept-encoding": "identity"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._http.close()

    def has(self, digest: str) -> bool:
        """Return whether the registry has a blob."""
        with self._answer("HEAD", self._url(self._address.blob(digest)), known=(404,)) as response:
            return response.status_code == 200

    def upload(self, digest: str, size_bytes: int, read: _Read) -> int:
        """Send a blob unless the registry has it. Return the number of bytes that were sent.

        Args:
            digest: the digest of the blob, which the registry checks.
            size_bytes: the size of the blob.
            read: returns a range of bytes of the blob.

        Raises:
            RetryableError: the registry does not answer. The next call continues.
            OperatorError: the registry refuses the blob or access.
        """
        if self.has(digest):
            return 0
        upload = _Upload(f"{self._address.registry}/{self._address.name}@{digest}")
        sent = failures = furthest = 0
        while True:
            try:
                url, offset = self._resumed(upload.url) or self._begun()
                while offset < size_bytes:
                    part = read(offset, min(offset + CHUNK_BYTES, size_bytes))
                    url, offset = self._send_chunk(url, offset, part)
                    upload.keep(url)
                    sent += len(part)
                    if offset > furthest:
                        failures, furthest = 0, offset
                self._end(url, digest)
            except _UploadEndedError as exc:
                upload.forget()
                failures = self._wait(failures, exc)
            except RetryableError as exc:
                failures = self._wait(failures, exc)
            else:
                upload.forget()
                return sent

    def put_manifest(self, tag: str, media_type: str, manifest: bytes) -> None:
        """Store the manifest of an artifact under a tag.

        Raises:
            OperatorError: the registry refuses it, or has stored other bytes.
        """
        url = self._url(f"/v2/{self._address.name}/manifests/{tag}")
        with self._answer("PUT", url, content=manifest, headers={"content-type": media_type}) as response:
            stored = response.headers.get("docker-content-digest", "")
        if stored not in ("", digest_of(manifest)):
            raise OperatorError(
                f"{self._address.registry} stored {stored:.80} instead of the artifact's manifest."
            )

    def read(self, digest: str, *, limit_bytes: int) -> bytes:
        """Read a small blob.

        Raises:
            PackageError: `blob-size`: the registry sends more bytes. `blob-digest`: it sends other bytes.
        """
        with self._opened(digest, 0) as response:
            data = _limited(response, limit_bytes)
        if (found := digest_of(data)) != digest:
            raise PackageError("blob-digest", f"{self._address} sent {found} instead of {digest}")
        return data

    def download(self, digest: str, size_bytes: int, blobs: BlobFolder) -> None:
        """Fetch a blob into a folder unless it is there. A later call continues an interrupted download.

        Raises:
            PackageError: `blob-size` or `blob-digest`: the registry sends other bytes, which are discarded.
            RetryableError: the registry does not answer. The next call continues.
        """
        if blobs.has(digest):
            return
        part = blobs.incoming() / f"{blobs.path(digest).name}.part"
        part.touch()
        failures = 0
        try:
            while (stored := part.stat().st_size) < size_bytes:
                try:
                    self._append(digest, size_bytes, part, stored)
                except RetryableError as exc:
                    failures = self._wait(0 if part.stat().st_size > stored else failures, exc)
            blobs.adopt_file(part, digest)
        except PackageError:
            part.unlink()
            raise

    def _append(self, digest: str, size_bytes: int, part: Path, stored: int) -> None:
        with self._opened(digest, stored) as response:
            continued = response.status_code == 206 and _numbers(response, "content-range")[:1] == [stored]
            if response.status_code == 206 and not continued:
                raise PackageError("blob-size", f"{self._address} sent another range of {digest}")
            room = size_bytes - (stored if continued else 0)
            with part.open("ab" if continued else "wb") as file:
                for chunk in response.iter_raw():
                    room -= len(chunk)
                    if room < 0:
                        raise PackageError(
                            "blob-size", f"{self._address} sent more bytes of {digest} than it has"
                        )
                    file.write(chunk)
        if room:
            raise RetryableError(f"{self._address.registry} sent {digest} without its last {room} bytes.")

    @contextmanager
    def _opened(self, digest: str, start: int) -> Iterator[httpx.Response]:
        """Open a blob for reading. One redirect is followed, without the login."""
        asked = {"range": f"bytes={start}-"} if start else {}
        url = self._url(self._address.blob(digest))
        with self._answer("GET", url, headers=asked, known=(302, 303, 307)) as response:
            if response.status_code in (200, 206):
                yield response
                return
            target = self._target(response)
        # A remote registry could otherwise make this machine call its own programs.
        safe = is_loopback(url.host) if is_loopback(target.host) else target.scheme == "https"
        if not safe:
            raise OperatorError(
                f"{self._address.registry} redirects to {target.scheme:.20}://{target.host:.100}. Only https "
                "to another machine is allowed."
            )
        with self._sent("GET", target, asked) as moved:
            if moved.status_code not in (200, 206):
                raise RetryableError(f"{target.host} answered {moved.status_code} to a redirected download.")
            yield moved

    def _resumed(self, kept: str) -> tuple[httpx.URL, int] | None:
        """Return the address of an unfinished upload, and the number of bytes that the registry has."""
        if not kept:
            return None
        try:
            with self._answer("GET", self._own(httpx.URL(kept))) as response:
                url, last = self._place(response)
                # `0-0` stands for one byte or for none (CNCF distribution), so send this byte again.
                return url, last + 1 if last else 0
        except (httpx.InvalidURL, OperatorError):
            return None

    def _begun(self) -> tuple[httpx.URL, int]:
        url = self._url(f"/v2/{self._address.name}/blobs/uploads/")
        with self._answer("POST", url, headers={"content-length": "0"}) as response:
            return self._own(self._target(response)), 0

    def _send_chunk(self, url: httpx.URL, offset: int, part: bytes) -> tuple[httpx.URL, int]:
        headers = {
            "content-type": "application/octet-stream",
            "content-range": f"{offset}-{offset + len(part) - 1}",
        }
        with self._answer("PATCH", url, content=part, headers=headers, known=_ENDED_UPLOAD) as response:
            if response.status_code in _ENDED_UPLOAD:
                raise _UploadEndedError(self._refusal(response))
            url, last = self._place(response)
        if last != offset + len(part) - 1:
            raise _UploadEndedError(
                f"{self._address.registry} has {last + 1} instead of {offset + len(part)} bytes."
            )
        return url, offset + len(part)

    def _end(self, url: httpx.URL, digest: str) -> None:
        whole = url.copy_merge_params({"digest": digest})
        with self._answer("PUT", whole, known=_ENDED_UPLOAD, headers={"content-length": "0"}) as response:
            if response.status_code in _ENDED_UPLOAD:
                raise _UploadEndedError(self._refusal(response))

    def _place(self, response: httpx.Response) -> tuple[httpx.URL, int]:
        """Return the address of the next chunk, and the position of the last byte that the registry has."""
        return self._own(self._target(response)), (_numbers(response, "range") or [0])[-1]

    def _target(self, response: httpx.Response) -> httpx.URL:
        try:
            return response.url.join(response.headers["location"])
        except (KeyError, httpx.InvalidURL) as exc:
            raise OperatorError(f"{self._address.registry} sent a malformed `Location`: {exc}.") from exc

    def _own(self, url: httpx.URL) -> httpx.URL:
        """Return the address of an upload, which gets the login and the bytes, if it is on the registry."""
        own = httpx.URL(self._address.url)
        if (url.scheme, url.host, url.port) != (own.scheme, own.host, own.port):
            raise OperatorError(
                f"{self._address.registry} redirects the upload to {url.scheme:.20}://{url.host:.100}. "
                "Neither the login nor the package was sent there."
            )
        return url

    def _url(self, path: str) -> httpx.URL:
        return httpx.URL(self._address.url + path)

    @contextmanager
    def _answer(
        self,
        method: str,
        url: httpx.URL,
        *,
        content: bytes = b"",
        headers: Mapping[str, str] | None = None,
        known: Container[int] = (),
    ) -> Iterator[httpx.Response]:
        """Send a request with the login, and open the answer. A challenge is answered once.

        Raises:
            OperatorError: a refusal whose status is not in `known`.
            RetryableError: the registry cannot be reached, or asks to try again later.
        """
        for challenged in (False, True):
            sent = {**(headers or {}), **self._access.headers}
            with self._sent(method, url, sent, content) as response:
                if response.status_code == 401 and not challenged:
                    challenge = response.headers.get("www-authenticate", "")
                elif response.status_code in (401, 403):
                    raise self._access.refuse()
                elif response.status_code in _LATER:
                    wait_s = stated_wait_s(response.headers)
                    raise RetryableError(self._refusal(response), retry_after_s=wait_s)
                elif not response.is_success and response.status_code not in known:
                    raise OperatorError(self._refusal(response))
                else:
                    yield response
                    return
            self._access.take_up(challenge)

    @contextmanager
    def _sent(
        self, method: str, url: httpx.URL, headers: Mapping[str, str], content: bytes = b""
    ) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, url, headers=dict(headers), content=content or None) as response:
                yield response
        except (httpx.TransportError, UnicodeError) as exc:
            raise RetryableError(f"{url.host} does not answer: {reason(exc)}.") from exc

    def _fetch_token(self, url: str, headers: Mapping[str, str]) -> bytes:
        with self._sent("GET", httpx.URL(url), headers) as response:
            if response.status_code != 200:
                raise self._access.refuse()
            return _limited(response, TOKEN_LIMIT_BYTES)

    def _refusal(self, response: httpx.Response) -> str:
        said = ""
        with suppress(ValueError, KeyError, TypeError, IndexError, RecursionError, PackageError):
            error = json.loads(_limited(response, _ANSWER_LIMIT_BYTES))["errors"][0]
            said = printable(f" {error['code']}: {error['message']}")[:300]
        request = response.request
        asked = f"{request.method} {request.url.path}"
        return f"{self._address.registry} answered {response.status_code} to {asked}.{said}"

    def _wait(self, failures: int, error: Exception) -> int:
        """Wait after a failure. Return the number of failures, or raise the error after the last attempt."""
        if failures + 1 >= ATTEMPTS:
            raise error
        stated = getattr(error, "retry_after_s", None)
        if stated is not None and stated > _LONGEST_WAIT_S:
            raise error
        self._sleep(0.5 * 2.0**failures if stated is None else stated)
        return failures + 1


class _UploadEndedError(OperatorError):
    """The registry does not continue an upload."""


class _Upload:
    """The address of an unfinished upload, kept for the next process. Only the user can read its file.

    It is a convenience: without the file, the upload starts again.
    """

    def __init__(self, name: str) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._path = cache / "permille" / "uploads" / digest_of(name.encode()).removeprefix("sha256:")

    @property
    def url(self) -> str:
        """The address, or ""."""
        try:
            return self._path.read_text("ascii")
        except (OSError, ValueError):
            return ""

    def keep(self, url: httpx.URL) -> None:
        """Store the address."""
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(self._path, str(url).encode("ascii"), mode=0o600)

    def forget(self) -> None:
        """Remove the address."""
        self._path.unlink(missing_ok=True)


def _limited(response: httpx.Response, limit_bytes: int) -> bytes:
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > limit_bytes:
            raise PackageError("blob-size", f"{response.url.host} sent more than {limit_bytes} bytes")
    return bytes(data)


def _numbers(response: httpx.Response, header: str) -> list[int]:
    """Return the numbers of a header such as `Range: 0-999` or `Content-Range: bytes 5-999/1000`."""
    return [int(text) for text in re.findall(r"[0-9]{1,18}", response.headers.get(header, ""))]
