"""Content-addressed blobs in a folder: `<root>/sha256/<first 2 hex>/<64 hex>` (FORMAT 2).

A blob appears whole or not at all. Its bytes are hashed while they are written to a temporary file under
`<root>/incoming`. The file is then made read-only, synced and renamed. A killed writer leaves a temporary
file, which `sweep` removes. Paths are made from digests only, never from names that come from outside.
"""

import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from permille.digests import digest_of, digest_of_file, is_digest
from permille.errors import PackageError
from permille.files import fsync_folder
from permille.system import set_mode

CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlob:
    """The entry of a blob in a listing. `written_at_s` is the Unix time when it was last stored."""

    digest: str
    size_bytes: int
    written_at_s: float


class BlobWriter:
    """A blob that is being written. It becomes visible with `commit`."""

    def __init__(self, folder: "BlobFolder", file: BinaryIO, temporary: Path) -> None:
        self._folder = folder
        self._file = file
        self._temporary = temporary
        # Bytes are hashed on their way to disk, so a large blob is not read a second time.
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes.

        Raises:
            OSError: from the file system, for example for a full disk. The blob will not exist.
        """
        self._file.write(data)
        self._hash.update(data)
        self.size_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def commit(self, expected: str | None = None) -> str:
        """Make the blob durable and visible. Return its digest.

        Raises:
            PackageError: `blob-digest`: the digest of the written bytes is not `expected`. Nothing is
                stored then.
        """
        digest = "sha256:" + self._hash.hexdigest()
        if expected is not None and digest != expected:
            raise _damaged(expected, digest)
        self._file.flush()
        # Make the bytes durable before they get a name, so that no name stands for bytes that a crash loses.
        _make_durable(self._file)
        self._folder._install(self._temporary, digest)
        return digest


class BlobFolder:
    """The blobs below `root`. Several processes may share them, since equal names hold equal bytes.

    Example:

        blobs = BlobFolder(Path("/var/lib/permille/blobs"))
        digest = blobs.put_bytes(b"hello")
        assert blobs.read(digest, limit=100) == b"hello"
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def hurried(self) -> "BlobFolder":
        """Return the same store with short timeouts, for callers that hold a database lock.

        A folder has no timeouts, so it returns itself.
        """
        return self

    def path(self, digest: str) -> Path:
        """Return the path of a blob, whether or not it exists.

        Raises:
            PackageError: `digest-malformed`.
        """
        if not is_digest(digest):
            raise PackageError("digest-malformed", f"expected sha256: and 64 hex digits, got {digest!r:.100}")
        hexadecimal = digest.removeprefix("sha256:")
        return self.root / "sha256" / hexadecimal[:2] / hexadecimal

    def has(self, digest: str) -> bool:
        """Return whether the blob exists. This does not read its bytes."""
        return self.path(digest).is_file()

    def size(self, digest: str) -> int:
        """Return the size of the blob in bytes.

        Raises:
            PackageError: `blob-missing`.
        """
        found = self.entry(digest)
        if found is None:
            raise _missing(digest)
        return found.size_bytes

    def open(self, digest: str) -> BinaryIO:
        """Open the blob for reading.

        Raises:
            PackageError: `blob-missing`.
        """
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError as exc:
            raise _missing(digest) from exc

    def read(self, digest: str, *, limit: int) -> bytes:
        """Return the bytes of a small blob after checking their hash.

        Raises:
            PackageError: `blob-missing`, `blob-size` (more than `limit`) or `blob-digest`.
        """
        with self.open(digest) as file:
            data = file.read(limit + 1)
        # The read above takes at most one byte more than the limit, so a large blob cannot fill the memory.
        if len(data) > limit:
            raise PackageError(
                "blob-size", f"The blob {digest} has more than {limit} bytes, which is too large."
            )
        if digest_of(data) != digest:
            raise _damaged(digest, digest_of(data))
        return data

    def check(self, digest: str) -> None:
        """Check the hash of the stored bytes.

        Raises:
            PackageError: `blob-missing` or `blob-digest`.
        """
        with self.open(digest) as file:
            # `BinaryIO` does not declare `readinto`, which all our files have.
            hashed = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
        found = f"sha256:{hashed.hexdigest()}"
        if found != digest:
            raise _damaged(digest, found)

    def stream(self, digest: str, begin: int, end: int) -> Iterator[bytes]:
        """Yield the stored bytes from `begin` to `end`. They are not checked here: the receiver hashes them.

        Raises:
            PackageError: `blob-missing`.
        """
        with self.open(digest) as file:
            file.seek(begin)
            while begin < end and (chunk := file.read(min(CHUNK_BYTES, end - begin))):
                begin += len(chunk)
                yield chunk

    def opened_by(self, digest: str, media_type: str) -> str | None:  # noqa: ARG002 - for `BucketFolder`
        """Return an address that lets anyone read this blob, or None. A folder has no such address."""
        return None

    @contextmanager
    def writer(self) -> Iterator[BlobWriter]:
        """Open a blob for writing in pieces. Without `commit`, nothing is kept."""
        incoming = self.incoming()
        descriptor, name = tempfile.mkstemp(dir=incoming, suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield BlobWriter(self, file, temporary)
        finally:
            temporary.unlink(missing_ok=True)

    def put_bytes(self, data: bytes, *, expected: str | None = None) -> str:
        """Store these bytes. Return their digest."""
        with self.writer() as writer:
            writer.write(data)
            return writer.commit(expected)

    def put_file(self, path: Path, *, expected: str | None = None) -> str:
        """Store a copy of a file. Return its digest."""
        with path.open("rb") as source, self.writer() as writer:
            shutil.copyfileobj(source, writer, CHUNK_BYTES)
            return writer.commit(expected)

    def adopt_file(self, path: Path, expected: str) -> str:
        """Move a finished download into the folder, without a copy. The file must be on the file system
        of the folder.

        Raises:
            PackageError: `blob-digest`. The file then stays where it is.
        """
        found = digest_of_file(path)
        if found != expected:
            raise _damaged(expected, found)
        with path.open("rb") as file:
            _make_durable(file)
        self._install(path, expected)
        return expected

    def put_unnamed(self, file: BinaryIO) -> str:
        """Store an open file that has no name. Return its digest. The caller must not write to the
        file any more.

        If the file is on the file system of the blobs, and `O_TMPFILE` made it, the file itself becomes the
        blob, so tens of gigabytes are not copied. Otherwise, a copy is stored.
        """
        file.seek(0)
        temporary = self.incoming() / f"{secrets.token_hex(8)}.tmp"
        try:
            # A killed writer leaves nothing, because the file had no name until here.
            # `open(2)` documents this path for giving a name to a file without one. The path is absolute, so
            # `src_dir_fd` names no folder. But without it, `os.link` does not follow the symbolic link.
            source = f"/proc/self/fd/{file.fileno()}"
            os.link(source, temporary, src_dir_fd=file.fileno(), follow_symlinks=True)
        except OSError:
            with self.writer() as writer:
                shutil.copyfileobj(file, writer, CHUNK_BYTES)
                return writer.commit()
        try:
            _make_durable(file)
            digest = digest_of_file(temporary)
            self._install(temporary, digest)
        finally:
            temporary.unlink(missing_ok=True)
        return digest

    def check_writable(self, size_bytes: int) -> None:
        """Write this many bytes and remove them again. Raises OSError."""
        with tempfile.TemporaryFile(dir=self.incoming()) as file:
            file.write(bytes(size_bytes))
            file.flush()
            os.fsync(file.fileno())

    def delete(self, digest: str) -> None:
        """Delete the blob. Idempotent."""
        self.path(digest).unlink(missing_ok=True)

    def entry(self, digest: str) -> StoredBlob | None:
        """Return the entry of a blob, or None if it does not exist."""
        try:
            found = self.path(digest).stat()
        except FileNotFoundError:
            return None
        return StoredBlob(digest=digest, size_bytes=found.st_size, written_at_s=found.st_mtime)

    def entries(self) -> Iterator[StoredBlob]:
        """List all blobs of this store, sorted by digest. Stores below this one are not included."""
        for folder in sorted((self.root / "sha256").glob("[0-9a-f][0-9a-f]")):
            for path in sorted(folder.iterdir()):
                digest = f"sha256:{path.name}"
                # A collection in another process may delete a blob while this one lists them.
                if is_digest(digest) and (found := self.entry(digest)) is not None:
                    yield found

    def below(self, *names: str, private: bool = False) -> "BlobFolder":  # noqa: ARG002 - for `BucketFolder`
        """Return a separate store inside this one, with its own listing and deletion.

        Args:
            private: True if the store may keep no local copies of its blobs. This matters only for a
                bucket, which then refuses calls of `path`.
        """
        return BlobFolder(self.root.joinpath(*map(_checked, names)))

    def names(self) -> list[str]:
        """Return the names of the stores directly below this one, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if path.is_dir())

    def erase(self) -> None:
        """Delete this store with everything in it. Idempotent.

        Raises:
            OSError: something could not be deleted, or was written meanwhile.
        """
        shutil.rmtree(self.root, ignore_errors=True)
        if self.root.exists():
            raise OSError(f"{self.root} could not be deleted. Check the permissions of what is in it.")

    def sweep(self, *, before_s: float) -> int:
        """Remove temporary files of killed writers that were last written before this Unix time.
        Return the number of removed files.
        """
        removed = 0
        for path in (self.root / "incoming").glob("*.tmp"):
            try:
                # Callers choose a `before_s` so far back that a running writer has written since.
                if path.stat().st_mtime < before_s:
                    path.unlink()
                    removed += 1
            except FileNotFoundError:
                continue
        return removed

    def incoming(self) -> Path:
        """Return the folder for temporary files, on the same file system. It is created at first use."""
        incoming = self.root / "incoming"
        incoming.mkdir(parents=True, exist_ok=True)
        return incoming

    def _install(self, temporary: Path, digest: str) -> None:
        target = self.path(digest)
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            # The new folders must survive a crash, too, or the blob in them would be lost.
            fsync_folder(self.root)
            fsync_folder(target.parent.parent)
        # Garbage collection spares young blobs. This blob is new, even if the file is old.
        os.utime(temporary)
        temporary.replace(target)
        fsync_folder(target.parent)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"expected a name of letters, digits, _ and -, got {name!r:.100}")
    return name


def _make_durable(file: BinaryIO) -> None:
    # Make the file read-only, so that no program changes the bytes under a digest by mistake.
    set_mode(file.fileno(), 0o444)
    os.fsync(file.fileno())


def _missing(digest: str) -> PackageError:
    return PackageError("blob-missing", f"There is no blob {digest} here. Fetch or build its package again.")


def _damaged(digest: str, found: str) -> PackageError:
    return PackageError(
        "blob-digest", f"The bytes of {digest} are damaged: their digest is {found}. Fetch them again."
    )
