"""Where blobs are kept: one protocol, and the folder that is the default."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from permille.package.blobs import BlobFolder


class BlobWriter(Protocol):
    """One blob under way. Nothing is visible before `commit`."""

    size_bytes: int

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes."""

    def commit(self, expected: str | None = None) -> str:
        """Make the blob durable and visible; return its digest.

        Raises PackageError when `expected` is another.
        """


class BlobStore(Protocol):
    """Content-addressed bytes: written once, named by digest, equal names hold equal bytes."""

    def has(self, digest: str) -> bool:
        """Whether the blob is here."""

    def size(self, digest: str) -> int:
        """Bytes of the blob. Raises PackageError `blob-missing`."""

    def open(self, digest: str) -> BinaryIO:
        """The blob's bytes, for reading and seeking. Raises PackageError `blob-missing`."""

    def read(self, digest: str, *, limit: int) -> bytes:
        """All bytes of a small blob, hashed before they are returned. Raises PackageError."""

    def put_bytes(self, data: bytes, *, expected: str | None = None) -> str:
        """Store these bytes; return their digest."""

    def writer(self) -> AbstractContextManager[BlobWriter]:
        """A blob written in pieces; leaving without `commit` leaves nothing."""

    def delete(self, digest: str) -> None:
        """Remove the blob; not being there is fine."""

    def iterate(self) -> Iterator[str]:
        """Digests of all blobs."""


class FolderBlobStore(BlobFolder):
    """The blob store of one machine, or of several that mount one file system: a blob folder.

    Workers hand it to the package writers and the reader, which map its files.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        root.mkdir(parents=True, exist_ok=True)
