"""Objects of an S3 bucket: put, read, list, delete, and presign.

This module handles keys and bytes. `folder.py` knows which blob an object is, and checks it. Failed
requests are repeated with backoff, and an interrupted body continues where it broke. A lasting
failure is a `BlobStoreError` if trying later may help, and an `OperatorError` if a person must act.

Credentials come from where all AWS programs look (AWS_ACCESS_KEY_ID, a profile, or the machine's
role). No message contains one.

The module uses botocore without boto3. The transfers of boto3 hash only single parts. They never
check the digest of the whole file.
"""

import base64
import copy
import hashlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from permille.errors import OperatorError, PackageError, PermilleError
from permille.package.blobs import CHUNK_BYTES
from permille.store.errors import BlobStoreError
from permille.store.settings import BucketAddress

# Larger files are sent in parts of this size. The parts are larger if a file would need more than 10,000
# parts.
PART_BYTES: Final = 64 << 20
_MOST_PARTS: Final = 10_000
_AT_A_TIME: Final = 4  # parts of a file that are sent at the same time
# At most this many threads wait for the bucket. The API has 40 threads, so at least 10 answer other requests.
_AT_ONCE: Final = 30
_TURN_S: Final = 1.0  # longest time that a thread waits for one of these places
# Validity of a presigned address. A download must begin within this time, but may end later.
_ADDRESS_S: Final = 300
# Vendors name a missing object in several ways.
_GONE: Final = frozenset({"404", "NoSuchKey", "NoSuchUpload", "NotFound"})
# Errors that last until a person acts.
_PERSON: Final = frozenset(
    {
        "401",
        "403",
        "AccessDenied",
        "AllAccessDisabled",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "NoSuchBucket",
        "SignatureDoesNotMatch",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object of a listing. `written_at_s` is Unix time."""

    key: str
    size_bytes: int
    written_at_s: float


class Bucket:
    """The objects of one bucket. Several threads may use it at the same time.

    Args:
        attempts: the number of attempts for each request. The pause between them grows to some seconds.
        reach_s: the timeout of `reach`.
        part_bytes: a file that is larger is sent in parts of this size.
    """

    def __init__(
        self,
        address: BucketAddress,
        *,
        attempts: int,
        reach_s: float = 5.0,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.address = address
        self._attempts = attempts
        self._timeout_s = 30.0
        self._reach_s = reach_s
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._clients: dict[tuple[int, float], Any] = {}
        self._turns = threading.BoundedSemaphore(_AT_ONCE)

    def hurried(self) -> "Bucket":
        """Return the same bucket with two attempts and short timeouts, for callers that keep others
        waiting.
        """
        # The copy shares the clients and the limit of waiting threads.
        other = copy.copy(self)
        other._attempts, other._timeout_s = 2, 10.0
        return other

    def head(self, key: str) -> StoredObject | None:
        """Return the size and the time of an object, or None if it does not exist."""
        try:
            with self._errors(f"size and age of {key}"):
                found = self._ask("head_object", Key=key)
                written_at_s = found["LastModified"].timestamp()
                return StoredObject(key=key, size_bytes=found["ContentLength"], written_at_s=written_at_s)
        except PackageError:
            return None

    def read(self, key: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of an object from `begin` to before `end`. Continue an interrupted body.

        Raises:
            PackageError: `blob-missing`.
            BlobStoreError: the body broke off at every attempt.
        """
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        at, failed = begin, 0
        while end is None or at < end:
            body, size_bytes = self._body(key, at, end)
            end = at + size_bytes if end is None else end
            was, broken = at, None
            with closing(body):
                try:
                    chunks = body.iter_chunks(CHUNK_BYTES)
                    while chunk := self._next(chunks):
                        at += len(chunk)
                        yield chunk
                except (HTTPClientError, IncompleteReadError) as exc:
                    broken = exc
            if at < end:
                # Progress resets the count: a long download may break often and still finish.
                failed = 1 if at > was else failed + 1
                if failed >= self._attempts:
                    raise BlobStoreError(f"The download of {key} stopped at byte {at} of {end}.") from broken
                time.sleep(random.uniform(0.0, 0.2 * 2.0**failed))  # noqa: S311 - jitter needs no secrecy

    def put(self, key: str, path: Path, digest: str) -> None:
        """Store a file whole, or not at all. We check its digest, and the bucket checks what arrives.

        Raises:
            PackageError: `blob-digest`: the file has another digest.
            BlobStoreError: the bucket did not take the file.
        """
        # A single PUT is limited to 5 GB on S3, and cannot be continued.
        if path.stat().st_size > self._part_bytes:
            self._put_parts(key, path, digest)
            return
        data = path.read_bytes()
        whole = hashlib.sha256(data)
        _check_digest(whole.hexdigest(), digest)
        self._ask("put_object", Key=key, Body=data, ChecksumSHA256=_base64(whole.digest()))

    def delete(self, key: str) -> None:
        """Delete an object. Idempotent."""
        # S3 gives the same answer whether or not the object exists, so a second deletion is no error.
        self._ask("delete_object", Key=key)

    def entries(self, prefix: str) -> Iterator[StoredObject]:
        """List all objects whose keys have this prefix, sorted by key."""
        for page in self._pages("list_objects_v2", Prefix=prefix):
            with self._errors(f"a list of {prefix}"):
                listed = [
                    StoredObject(
                        key=found["Key"],
                        size_bytes=found["Size"],
                        written_at_s=found["LastModified"].timestamp(),
                    )
                    for found in page.get("Contents", ())
                ]
            yield from listed

    def names(self, prefix: str) -> list[str]:
        """Return the distinct names between the prefix and the next slash, sorted."""
        pages = self._pages("list_objects_v2", Prefix=prefix, Delimiter="/")
        with self._errors(f"a list of {prefix}"):
            found = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ())]
        return sorted(name.removeprefix(prefix).rstrip("/") for name in found)

    def erase(self, prefix: str) -> None:
        """Delete all objects whose keys have this prefix, and abort uploads to such keys."""
        self.abort_uploads(prefix, lambda _: True)
        for found in self.entries(prefix):
            self.delete(found.key)

    def abort_uploads(
        self, prefix: str, is_ours: Callable[[str], bool], *, before_s: float | None = None
    ) -> int:
        """Abort unfinished multipart uploads to our keys. Return how many there were.

        Args:
            is_ours: tells whether a key is one of ours.
            before_s: abort only uploads that began before this Unix time.
        """
        aborted = 0
        for page in self._pages("list_multipart_uploads", Prefix=prefix):
            for upload in page.get("Uploads", ()):
                with self._errors(f"the uploads of {prefix}"):
                    old = before_s is None or upload["Initiated"].timestamp() < before_s
                    if old and is_ours(upload["Key"]):
                        self._abort(upload["Key"], upload["UploadId"])
                        aborted += 1
        return aborted

    def opened_by(self, key: str, media_type: str) -> str:
        """Return a presigned address of one object. Anyone who has it can read the object for five
        minutes.
        """
        asked = {"Bucket": self.address.bucket, "Key": key, "ResponseContentType": media_type}
        with self._errors(f"an address of {key}"):
            return str(self._client.generate_presigned_url("get_object", asked, ExpiresIn=_ADDRESS_S))

    def reach(self) -> None:
        """Ask once whether the bucket exists and we may use it.

        Raises:
            BlobStoreError: the bucket did not answer.
            OperatorError: the bucket does not exist, or refuses us.
        """
        # Only one attempt: the caller wants a quick answer, and may ask again.
        client = self._connected(1, timeout_s=self._reach_s)
        try:
            with self._errors("the first request"):
                client.head_bucket(Bucket=self.address.bucket)
        except PackageError as exc:
            raise OperatorError(f"There is no bucket {self.address.bucket!r}. Make it first.") from exc

    @property
    def _client(self) -> Any:
        return self._connected(self._attempts, timeout_s=self._timeout_s)

    def _connected(self, attempts: int, *, timeout_s: float) -> Any:
        from botocore.config import Config
        from botocore.session import get_session

        with self._lock:  # sessions are not safe for threads; their clients are
            if (attempts, timeout_s) not in self._clients:
                config = Config(
                    connect_timeout=min(5, timeout_s),
                    read_timeout=timeout_s,
                    max_pool_connections=50,
                    retries={"mode": "standard", "total_max_attempts": attempts},
                    # Many other vendors support neither the newer checksums nor host names that contain the
                    # name of the bucket.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    s3={"addressing_style": "path" if self.address.endpoint else "auto"},
                    signature_version="s3v4",
                )
                at = {"endpoint_url": self.address.endpoint, "region_name": self.address.region}
                with self._errors("looking for credentials and a region"):
                    client = get_session().create_client("s3", config=config, **at)
                self._clients[attempts, timeout_s] = client
            return self._clients[attempts, timeout_s]

    def _ask(self, operation: str, **asked: object) -> Any:
        with self._turn(), self._errors(f"{operation} of {asked.get('Key', asked.get('Prefix'))}"):
            return getattr(self._client, operation)(Bucket=self.address.bucket, **asked)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Take one of the `_AT_ONCE` places for threads that wait for the bucket.

        Raises:
            BlobStoreError: all places are taken.
        """
        if not self._turns.acquire(timeout=_TURN_S):
            raise BlobStoreError(f"Too many requests wait for bucket {self.address.bucket!r}.")
        try:
            yield
        finally:
            self._turns.release()

    def _next(self, chunks: Iterator[bytes]) -> bytes:
        with self._turn():
            return next(chunks, b"")

    @contextmanager
    def _errors(self, step: str) -> Iterator[None]:
        """Translate errors of botocore. The bucket's own messages are not quoted, because they may contain
        a signed request.

        Raises:
            PackageError: `blob-missing`: there is no such object or upload.
            OperatorError: wrong credentials, rights or bucket name.
            BlobStoreError: any other failure, including invalid answers.
        """
        from botocore import exceptions

        failed = f"Bucket {self.address.bucket!r} failed at {step}"
        try:
            yield
        except exceptions.ClientError as exc:
            code = str(exc.response.get("Error", {}).get("Code", "?"))[:60]
            if code in _GONE:
                raise PackageError("blob-missing", f"{failed}: {code}") from exc
            # Repeating the request does not help if, for example, the credentials are wrong.
            kind = OperatorError if code in _PERSON else BlobStoreError
            raise kind(f"{failed}: {code}") from exc
        except (exceptions.HTTPClientError, exceptions.ConnectionError) as exc:
            raise BlobStoreError(f"{failed}: {type(exc).__name__}") from exc
        except exceptions.BotoCoreError as exc:  # no credentials, no region
            raise OperatorError(f"{failed}: {type(exc).__name__}: {exc}") from exc
        except (LookupError, ValueError, RecursionError) as exc:  # RecursionError: endless redirects
            raise BlobStoreError(f"{failed}: its answer is not valid ({type(exc).__name__})") from exc

    def _body(self, key: str, at: int, end: int | None) -> tuple[Any, int]:
        """Open a body from byte `at` on. Return it with its size. Raises BlobStoreError if the body begins at
        another byte.
        """
        asked = {} if at == 0 and end is None else {"Range": f"bytes={at}-{'' if end is None else end - 1}"}
        with self._errors(f"the size of {key}"):
            part = self._ask("get_object", Key=key, **asked)
            begins, size_bytes = str(part.get("ContentRange", ""))[:80], int(part["ContentLength"])
        # A server may ignore the range and send the whole object, which would corrupt the blob.
        if asked and not begins.startswith(f"bytes {at}-"):
            part["Body"].close()
            raise BlobStoreError(
                f"The bucket was asked for {key} from byte {at} on, but it sent {begins or 'all of it'}."
            )
        return part["Body"], size_bytes

    def _put_parts(self, key: str, path: Path, digest: str) -> None:
        with self._errors(f"an upload of {key}"):
            upload_id = self._ask("create_multipart_upload", Key=key, ChecksumAlgorithm="SHA256")["UploadId"]
        try:
            parts = self._send_parts(key, upload_id, path, digest)
            self._ask(
                "complete_multipart_upload", Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
        except BaseException:
            with suppress(PermilleError):  # unfinished parts are invisible, and `abort_uploads` finds them
                self._abort(key, upload_id)
            raise

    def _send_parts(self, key: str, upload_id: str, path: Path, digest: str) -> list[dict[str, object]]:
        """Send the parts, several at a time. The bucket checks each part, and we check the digest of
        the whole.
        """
        # S3 allows at most 10,000 parts.
        part_bytes = max(self._part_bytes, -(-path.stat().st_size // _MOST_PARTS))
        whole = hashlib.sha256()
        parts: list[dict[str, object]] = []
        waiting: deque[Future[dict[str, object]]] = deque()
        with path.open("rb") as file, ThreadPoolExecutor(_AT_A_TIME) as pool:
            while data := file.read(part_bytes):
                whole.update(data)
                number = len(parts) + len(waiting) + 1
                # At most `_AT_A_TIME` parts are in memory, however large the file is.
                waiting.append(pool.submit(self._send_part, key, upload_id, number, data))
                if len(waiting) >= _AT_A_TIME:
                    parts.append(waiting.popleft().result())
            parts += [sent.result() for sent in waiting]
        _check_digest(whole.hexdigest(), digest)
        return parts

    def _send_part(self, key: str, upload_id: str, number: int, data: bytes) -> dict[str, object]:
        part = {"PartNumber": number, "ChecksumSHA256": _base64(hashlib.sha256(data).digest())}
        sent = self._ask("upload_part", Key=key, UploadId=upload_id, Body=data, **part)
        return {**part, "ETag": sent["ETag"]}

    def _abort(self, key: str, upload_id: str) -> None:
        with suppress(PackageError):  # the upload has ended meanwhile
            self._ask("abort_multipart_upload", Key=key, UploadId=upload_id)

    def _pages(self, operation: str, **asked: str) -> Iterator[Any]:
        pages = iter(self._client.get_paginator(operation).paginate(Bucket=self.address.bucket, **asked))
        while True:
            with self._turn(), self._errors(f"{operation} of {asked['Prefix']}"):
                page = next(pages, None)
            if page is None:
                return
            yield page


def _check_digest(found: str, digest: str) -> None:
    if "sha256:" + found != digest:
        raise PackageError("blob-digest", f"The file of blob {digest} has the digest sha256:{found}.")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
