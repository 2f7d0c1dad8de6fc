"""Blobs in a bucket, with a local folder of copies, since workers map files by their path.

Each download is hashed, and only correct and complete bytes get a path. A new blob is first written
and hashed in the folder, then sent to the bucket. It exists once it is in the bucket. Keys are made
from digests like paths: `<prefix>/sha256/<2 hex>/<64 hex>`.

Several processes share the folder. Its size is bounded: the least recently used copies are deleted
first. A copy stays while a process uses its path or has it open. Such a process holds a lock on the
file, which the kernel releases when the process ends.
"""

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
from permille.extras import install_line
from permille.package.blobs import BlobFolder, StoredBlob
from permille.store.blobs.bucket import Bucket
from permille.store.settings import BucketAddress, StoreSettings
from permille.system import lock_file

_KEY: Final = re.compile(r"([^/]+/)*sha256/([0-9a-f]{2})/\2[0-9a-f]{62}", re.ASCII)
# A process holds the copies whose paths it has requested, but at most this many. Beyond this number, it
# releases the copy whose path was requested longest ago. Without the limit, a long-lived process would fill
# the disk.
_MOST_HELD: Final = 256


def open_blobs(settings: StoreSettings, *, attempts: int = 5) -> BlobFolder:
    """Return the blob store of the settings: a folder, or a bucket with a folder of copies.

    Args:
        attempts: the number of attempts for each request to a bucket. A worker can wait longer than a
            client of the API, so it may use more attempts.

    Raises:
        OperatorError: the settings name a bucket, and botocore is not installed.

    Example:

        blobs = open_blobs(StoreSettings())
        digest = blobs.put_bytes(b"hello")
    """
    if settings.blob_bucket is None:
        return BlobFolder(settings.blob_root)
    if find_spec("botocore") is None:
        raise OperatorError(f"A blob_bucket needs botocore. Run {install_line('s3')}.")
    bucket = Bucket(BucketAddress.parse(settings.blob_bucket), attempts=attempts)
    return BucketFolder(bucket, BlobCache(settings.blob_root, settings.blob_cache_bytes))


class BlobCache(BlobFolder):
    """The local folder of copies.

    Args:
        most_bytes: the limit on the bytes of all copies. Copies in use are kept even above this limit.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        super().__init__(root)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[str, BinaryIO] = OrderedDict()

    def use(self, digest: str) -> BinaryIO | None:
        """Open a copy, or return None if there is none. The copy stays while the file is open."""
        path = self.path(digest)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        # A shared lock marks the copy as used. `_let_go` deletes it only with an exclusive lock.
        lock_file(file.fileno(), shared=True)
        if os.fstat(file.fileno()).st_nlink == 0:  # it was deleted before we got the lock
            file.close()
            return None
        now_ns = time.time_ns()
        with suppress(OSError):  # the file may belong to another user
            os.utime(path, ns=(now_ns, now_ns))
        return file

    def hold(self, digest: str, file: BinaryIO) -> Path:
        """Return the path of an open copy. The copy stays until this process ends, or until the process has
        used the paths of `_MOST_HELD` other copies.
        """
        with self._lock:
            before = self._held.pop(digest, None)
            self._held[digest] = file
            # The dictionary is ordered by the last use, so its first item is the oldest.
            oldest = self._held.popitem(last=False)[1] if len(self._held) > _MOST_HELD else None
        for let_go in (before, oldest):
            if let_go is not None:
                let_go.close()
        return self.path(digest)

    def make_room(self, size_bytes: int) -> None:
        """Delete the least recently used copies until `size_bytes` more bytes fit into the limit of the
        folder and onto the disk.
        """
        with self.locked("room"):
            copies = sorted(self.entries(), key=lambda copy: copy.written_at_s)
            over = sum(copy.size_bytes for copy in copies) + size_bytes - self._most_bytes
            # Other programs may have filled the disk, so our own limit is not enough.
            over = max(over, size_bytes - shutil.disk_usage(self.root).free)
            for copy in copies:
                if over <= 0:
                    return
                if self._let_go(copy.digest):
                    over -= copy.size_bytes

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold a lock by this name against other processes and threads."""
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / name).open("ab") as file:
            lock_file(file.fileno())
            yield

    def _let_go(self, digest: str) -> bool:
        path = self.path(digest)
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            lock_file(file.fileno(), wait=False)
            path.unlink()
            return True
        return False


class BucketFolder(BlobFolder):
    """Blobs in a bucket. Several processes and threads may use it at the same time.

    Args:
        names: the path of this store within the bucket (see `below`); empty for the shared blobs.
        private: keep no local copies.
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
        """Return the same store with short timeouts."""
        bucket = self._bucket.hurried()
        return BucketFolder(bucket, self._cache, names=self._names, private=self._private)

    def path(self, digest: str) -> Path:
        """Return the path of a local copy, and download it if needed. `BlobCache.hold` says how long
        the copy stays.

        Raises:
            PackageError: `digest-malformed`, `blob-missing`, or `blob-digest` if the bucket holds
                other bytes.
            BlobStoreError, OperatorError: the bucket does not answer, or refuses us.
        """
        if self._private:
            raise ValueError("A private blob has no path: read it.")
        return self._cache.hold(digest, self._copy(digest))

    def open(self, digest: str) -> BinaryIO:
        """Open the blob for reading. A private blob is not checked. Raises the errors of `path`."""
        if not self._private:
            return self._copy(digest)
        # The file has no name. So no personal data stays on the disk if the process is killed.
        file = tempfile.TemporaryFile(dir=self.incoming())  # noqa: SIM115 - the caller closes it
        for chunk in self._bucket.read(self._key(digest)):
            file.write(chunk)
        file.seek(0)
        return file

    def read(self, digest: str, *, limit: int) -> bytes:
        """Return the checked bytes of a small blob. Download a damaged copy again. Raises the errors of
        `path`.
        """
        try:
            return super().read(digest, limit=limit)
        except PackageError as exc:
            if exc.code != "blob-digest":
                raise
            self._cache.delete(digest)
            return super().read(digest, limit=limit)

    def check(self, digest: str) -> None:
        """Check the bytes by their digest. Download a damaged copy again. Raises the errors of `path`."""
        try:
            super().check(digest)
        except PackageError as exc:
            if exc.code != "blob-digest":
                raise
            self._cache.delete(digest)
            super().check(digest)

    def entry(self, digest: str) -> StoredBlob | None:
        """Return the size and the time of a blob in the bucket, or None if it does not exist."""
        found = self._bucket.head(self._key(digest))
        if found is None:
            return None
        return StoredBlob(digest=digest, size_bytes=found.size_bytes, written_at_s=found.written_at_s)

    def has(self, digest: str) -> bool:
        """Return whether the bucket has the blob."""
        return self.entry(digest) is not None

    def entries(self) -> Iterator[StoredBlob]:
        """List all blobs of this store, sorted by digest. Stores below this one are not included."""
        for found in self._bucket.entries(f"{self._prefix}sha256/"):
            digest = f"sha256:{found.key.rpartition('/')[2]}"
            if is_digest(digest):
                yield StoredBlob(digest=digest, size_bytes=found.size_bytes, written_at_s=found.written_at_s)

    def delete(self, digest: str) -> None:
        """Delete the blob. Idempotent. Copies on other machines are deleted when room is needed."""
        self._bucket.delete(self._key(digest))
        self._cache.delete(digest)

    def below(self, *names: str, private: bool = False) -> "BucketFolder":
        """Return a store inside this one. See `BlobFolder.below`."""
        super().below(*names)  # checks the names
        return BucketFolder(self._bucket, self._cache, names=(*self._names, *names), private=private)

    def names(self) -> list[str]:
        """Return the names of the stores directly below this one, sorted."""
        return self._bucket.names(self._prefix)

    def erase(self) -> None:
        """Delete this store with everything in it. Idempotent."""
        # The store at the top holds the blobs of all tenants.
        if not self._names:
            raise ValueError("This is the store of all blobs. Erase a store below it instead.")
        self._bucket.erase(self._prefix)

    def check_writable(self, size_bytes: int) -> None:
        """Write this many bytes locally and remove them, and check that the bucket can be used.

        Raises:
            OSError: from the file system.
            BlobStoreError, OperatorError: the bucket does not answer, or refuses us.
        """
        super().check_writable(size_bytes)
        self._bucket.reach()

    def sweep(self, *, before_s: float) -> int:
        """Remove the remains of killed writers, here and in the bucket. Return how many there were."""
        aborted = self._bucket.abort_uploads(self._prefix, self._is_ours, before_s=before_s)
        return super().sweep(before_s=before_s) + aborted

    def stream(self, digest: str, begin: int, end: int) -> Iterator[bytes]:
        """Yield bytes of a blob from the bucket. They are not checked here: the receiver hashes them."""
        return self._bucket.read(self._key(digest), begin, end)

    def opened_by(self, digest: str, media_type: str) -> str:
        """Return a presigned address that lets anyone read this blob for five minutes."""
        return self._bucket.opened_by(self._key(digest), media_type)

    @property
    def _prefix(self) -> str:
        return "".join(f"{name}/" for name in (self._bucket.address.prefix, *self._names) if name)

    def _is_ours(self, key: str) -> bool:
        """Return whether this is the key of a blob, in this store or in one below it."""
        # If the address has no prefix, the bucket may also hold keys of other programs.
        return _KEY.fullmatch(key.removeprefix(self._prefix)) is not None

    def _key(self, digest: str) -> str:
        return self._prefix + self._cache.path(digest).relative_to(self.root).as_posix()

    def _copy(self, digest: str) -> BinaryIO:
        """Open a local copy whose bytes have this digest, and download it if needed."""
        while (file := self._cache.use(digest)) is None:
            # A process that waited for the lock finds the copy that another process fetched meanwhile.
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
        # Store the blob in the bucket first. A blob that is only in this folder would not exist for other
        # machines.
        self._bucket.put(self._key(digest), temporary, digest)
        if self._private:
            temporary.unlink()
            return
        self._cache.make_room(temporary.stat().st_size)
        self._cache._install(temporary, digest)
