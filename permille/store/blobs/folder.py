"""Blobs in a bucket, behind a local folder with copies of those in use: workers map files by their path.

A blob is hashed on its way from the bucket, and what is wrong or too short never gets a path. What is written
lies in the folder first, whole and hashed, then in the bucket; only then it is a blob. Keys are made of
digests, as paths are: `<prefix>/sha256/<2 hex>/<64 hex>`.

Processes share the folder. It is bounded: what was not used for longest goes first. Nothing goes whose path
a living process was given, or whose file it holds open: those are locks, which the kernel ends with it.
"""

import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Final

from permille.digests import is_digest
from permille.errors import OperatorError, PackageError
from permille.package.blobs import BlobFolder, StoredBlob
from permille.store.blobs.bucket import Bucket
from permille.store.settings import BucketAddress, StoreSettings

_KEY: Final = re.compile(r"([^/]+/)*sha256/([0-9a-f]{2})/\2[0-9a-f]{62}", re.ASCII)
# A process that runs for months lets go of the paths that it was given before so many others.
_MOST_HELD: Final = 256


def open_blobs(settings: StoreSettings, *, attempts: int = 5) -> BlobFolder:
    """The blobs that the settings name: a folder, or a bucket behind it.

    Args:
        attempts: of each request to a bucket; a worker has more patience than who waits for an answer.

    Raises:
        OperatorError: a bucket is named, and botocore is not installed.
    """
    if settings.blob_bucket is None:
        return BlobFolder(settings.blob_root)
    if find_spec("botocore") is None:
        raise OperatorError("A blob_bucket needs botocore: pip install 'permille[s3]'.")
    bucket = Bucket(BucketAddress.parse(settings.blob_bucket), attempts=attempts)
    return BucketFolder(bucket, BlobCache(settings.blob_root, settings.blob_cache_bytes))


class BlobCache(BlobFolder):
    """The local folder: copies of blobs, as many as fit beside those in use.

    Args:
        most_bytes: of all copies; what is in use may be more.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        super().__init__(root)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[str, BinaryIO] = OrderedDict()

    def use(self, digest: str) -> BinaryIO | None:
        """Open a copy, which stays while the file is open; None: there is none."""
        path = self.path(digest)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file.fileno()).st_nlink == 0:  # it went before the lock was ours
            file.close()
            return None
        now_ns = time.time_ns()
        with suppress(OSError):  # another user's
            os.utime(path, ns=(now_ns, now_ns))
        return file

    def hold(self, digest: str, file: BinaryIO) -> Path:
        """The path of a copy in use, which stays as long as this process."""
        with self._lock:
            before = self._held.pop(digest, None)
            self._held[digest] = file
            oldest = self._held.popitem(last=False)[1] if len(self._held) > _MOST_HELD else None
        for let_go in (before, oldest):
            if let_go is not None:
                let_go.close()
        return self.path(digest)

    def make_room(self, size_bytes: int) -> None:
        """Remove copies that were not used for longest, until so many bytes more fit into bound and disk."""
        with self.locked("room"):
            copies = sorted(self.entries(), key=lambda copy: copy.written_at_s)
            over = sum(copy.size_bytes for copy in copies) + size_bytes - self._most_bytes
            over = max(over, size_bytes - shutil.disk_usage(self.root).free)
            for copy in copies:
                if over <= 0:
                    return
                if self._let_go(copy.digest):
                    over -= copy.size_bytes

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Wait for other processes, and threads, that have locked this name."""
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / name).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _let_go(self, digest: str) -> bool:
        path = self.path(digest)
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
        return False


class BucketFolder(BlobFolder):
    """Blobs in a bucket. Safe for several processes, and for threads.

    Args:
        names: of the stores that this one is below of.
        private: no copy of its blobs is kept here.
    """

    def __init__(
        self, bucket: Bucket, cache: BlobCache, *, names: tuple[str, ...] = (), private: bool = False
    ) -> None:
        super().__init__(cache.root)
        self._bucket = bucket
        self._cache = cache
        self._names = names
        self._private = private

    def hurried(self) -> "BucketFolder":
        """See `BlobFolder`."""
        bucket = self._bucket.hurried()
        return BucketFolder(bucket, self._cache, names=self._names, private=self._private)

    def path(self, digest: str) -> Path:
        """A file with the blob's bytes, which stays as long as this process; fetched where it is not here.

        Raises:
            PackageError: `digest-malformed`, `blob-missing`, or `blob-digest`: the bucket holds other bytes.
            BlobStoreError, OperatorError: the bucket does not answer, or not to us.
        """
        if self._private:
            raise ValueError("A private blob has no path: read it.")
        return self._cache.hold(digest, self._copy(digest))

    def open(self, digest: str) -> BinaryIO:
        """The blob's bytes, for reading. Raises as `path`."""
        if not self._private:
            return self._copy(digest)
        file = tempfile.TemporaryFile(dir=self.incoming())  # noqa: SIM115 - it is the caller's
        for chunk in self._bucket.read(self._key(digest)):
            file.write(chunk)
        file.seek(0)
        return file

    def read(self, digest: str, *, limit: int) -> bytes:
        """Return the checked bytes of a small blob. Fetch a damaged copy again. Raises as `path`."""
        try:
            return super().read(digest, limit=limit)
        except PackageError as exc:
            if exc.code != "blob-digest":
                raise
            self._cache.delete(digest)
            return super().read(digest, limit=limit)

    def check(self, digest: str) -> None:
        """Hash the bytes; a copy that has gone bad is fetched again. Raises as `path`."""
        try:
            super().check(digest)
        except PackageError as exc:
            if exc.code != "blob-digest":
                raise
            self._cache.delete(digest)
            super().check(digest)

    def entry(self, digest: str) -> StoredBlob | None:
        """Return the bucket's entry of this blob, or None if it is not there."""
        found = self._bucket.head(self._key(digest))
        if found is None:
            return None
        return StoredBlob(digest=digest, size_bytes=found.size_bytes, written_at_s=found.written_at_s)

    def has(self, digest: str) -> bool:
        """Return whether the bucket has the blob."""
        return self.entry(digest) is not None

    def entries(self) -> Iterator[StoredBlob]:
        """List all blobs of this store, sorted by digest; stores below are not part of it."""
        for found in self._bucket.entries(f"{self._prefix}sha256/"):
            digest = f"sha256:{found.key.rpartition('/')[2]}"
            if is_digest(digest):
                yield StoredBlob(digest=digest, size_bytes=found.size_bytes, written_at_s=found.written_at_s)

    def delete(self, digest: str) -> None:
        """Remove the blob; not being there is fine. Copies elsewhere go when there is no room for them."""
        self._bucket.delete(self._key(digest))
        self._cache.delete(digest)

    def below(self, *names: str, private: bool = False) -> "BucketFolder":
        """See `BlobFolder`."""
        super().below(*names)  # refuses what is no name
        return BucketFolder(self._bucket, self._cache, names=(*self._names, *names), private=private)

    def names(self) -> list[str]:
        """Names of the stores directly below, sorted."""
        return self._bucket.names(self._prefix)

    def erase(self) -> None:
        """Remove this store with all that it holds; not being there is fine."""
        if not self._names:
            raise ValueError("Only a store below the blobs can be erased, not all blobs.")
        self._bucket.erase(self._prefix)

    def check_writable(self, size_bytes: int) -> None:
        """Write so many bytes here, and ask the bucket whether it is there.

        Raises:
            OSError: as the file system reports it.
            BlobStoreError, OperatorError: the bucket does not answer, or not to us.
        """
        super().check_writable(size_bytes)
        self._bucket.reach()

    def sweep(self, *, before_s: float) -> int:
        """Remove what killed writers left, here and on the way to the bucket; return how many."""
        aborted = self._bucket.abort_uploads(self._prefix, self._is_ours, before_s=before_s)
        return super().sweep(before_s=before_s) + aborted

    def stream(self, digest: str, begin: int, end: int) -> Iterator[bytes]:
        """Bytes of a blob as the bucket sends them, not hashed: whoever gets them compares."""
        return self._bucket.read(self._key(digest), begin, end)

    def opened_by(self, digest: str, media_type: str) -> str:
        """An address by which whoever has it may read this one blob, for some minutes."""
        return self._bucket.opened_by(self._key(digest), media_type)

    @property
    def _prefix(self) -> str:
        return "".join(f"{name}/" for name in (self._bucket.address.prefix, *self._names) if name)

    def _is_ours(self, key: str) -> bool:
        """Return whether this is the key of a blob, here or in a store below.

        Without a prefix, others may use the bucket, too.
        """
        return _KEY.fullmatch(key.removeprefix(self._prefix)) is not None

    def _key(self, digest: str) -> str:
        return self._prefix + self._cache.path(digest).relative_to(self.root).as_posix()

    def _copy(self, digest: str) -> BinaryIO:
        """A copy, open, of the bytes that hash to this digest."""
        while (file := self._cache.use(digest)) is None:
            # Who waits here finds what another process has fetched meanwhile.
            with self._cache.locked(self._cache.path(digest).parent.name):
                if not self._cache.has(digest):
                    self._fetch(digest)
        return file

    def _fetch(self, digest: str) -> None:
        self._cache.make_room(self.size(digest))
        with self._cache.writer() as writer:
            for chunk in self._bucket.read(self._key(digest)):
                writer.write(chunk)
            writer.commit(digest)

    def _install(self, temporary: Path, digest: str) -> None:
        self._bucket.put(self._key(digest), temporary, digest)
        if self._private:
            temporary.unlink()
            return
        self._cache.make_room(temporary.stat().st_size)
        self._cache._install(temporary, digest)
