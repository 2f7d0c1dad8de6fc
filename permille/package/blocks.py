"""Hashes of the big layers by blocks of 1 MiB (FORMAT 4.7): damage has a place, and costs a block to mend.

The layer `blocks` lists the SHA-256 of each block of `dense`, then of `plain`. A package checks them all
before its first big tensor is read, in several threads: a flipped bit is found before anything is computed
with it. What damages the bytes after that is found by the next process, or by whoever calls `damaged_blocks`.
A Merkle tree was considered: it saves bytes only where a reader asks for single blocks of a layer that it
lacks, which nobody does.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import BLOCK_BYTES, BLOCK_HASH_BYTES, BLOCKED_ROLES, Role
from permille.package.manifest import Layer, Manifest

# Two saturate the memory of a small machine; hashing needs no interpreter lock.
_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of a large layer with its expected SHA-256.

    `begin` and `end` are offsets in the blob.
    """

    layer: Layer
    begin: int
    end: int
    sha256: bytes

    def __str__(self) -> str:
        """Return the name for messages."""
        return f"bytes {self.begin} to {self.end - 1} of {self.layer.role} {self.layer.digest}"


def write_blocks(blobs: BlobFolder, layers: Iterable[Layer]) -> Layer:
    """Hash the stored big layers by blocks and store the list; other layers are passed over.

    Raises:
        OSError: as the file system reports it.
    """
    big = [layer for layer in layers if layer.role in BLOCKED_ROLES]
    big.sort(key=lambda layer: BLOCKED_ROLES.index(layer.role))
    listed = bytearray()
    for layer in big:
        with blobs.open(layer.digest) as file:
            while data := file.read(BLOCK_BYTES):
                listed += hashlib.sha256(data).digest()
    return Layer(role=Role.BLOCKS, digest=blobs.put_bytes(bytes(listed)), size_bytes=len(listed))


def package_blocks(blobs: BlobFolder, manifest: Manifest) -> list[Block]:
    """The blocks of a package's big layers.

    Raises:
        PackageError: `blob-missing`, `blob-size` or `blob-digest` of the list itself.
    """
    layer = manifest.layer(Role.BLOCKS)
    return list(_blocks(manifest, blobs.read(layer.digest, limit=layer.size_bytes)))


def check_blocks(blobs: BlobFolder, blocks: Sequence[Block]) -> None:
    """Hash the stored bytes of these blocks.

    Raises:
        PackageError: `block-digest`; the message names the first block that is damaged and counts the others.
    """
    if damaged := damaged_blocks(blobs, blocks):
        others = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise PackageError("block-digest", f"expected other bytes: {damaged[0]} are damaged{others}")


def damaged_blocks(blobs: BlobFolder, blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks whose stored bytes differ from their hash or are missing.

    Raises:
        PackageError: `blob-missing`.
    """
    files = {digest: blobs.open(digest) for digest in {block.layer.digest for block in blocks}}
    try:
        handles = {digest: file.fileno() for digest, file in files.items()}
        with ThreadPoolExecutor(_THREADS) as pool:
            whole = pool.map(lambda block: _is_whole(handles[block.layer.digest], block), blocks)
            return [block for block, good in zip(blocks, whole, strict=True) if not good]
    finally:
        for file in files.values():
            file.close()


def mend_block(blobs: BlobFolder, block: Block, data: bytes) -> None:
    """Restore a block's bytes in place. Processes that have the blob mapped see them, too.

    Raises:
        PackageError: `block-digest`: these are not its bytes; nothing is written.
        OSError: as the file system reports it.
    """
    if hashlib.sha256(data).digest() != block.sha256:
        raise PackageError("block-digest", f"expected {block}, got other bytes")
    path = blobs.path(block.layer.digest)
    path.chmod(0o644)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, block.begin)
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o444)


def _blocks(manifest: Manifest, listed: bytes) -> Iterator[Block]:
    position = 0
    for role in BLOCKED_ROLES:
        layer = manifest.layer(role)
        for begin in range(0, layer.size_bytes, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, layer.size_bytes)
            sha256 = listed[position : position + BLOCK_HASH_BYTES]
            yield Block(layer=layer, begin=begin, end=end, sha256=sha256)
            position += BLOCK_HASH_BYTES


def _is_whole(handle: int, block: Block) -> bool:
    data = os.pread(handle, block.end - block.begin, block.begin)
    return hashlib.sha256(data).digest() == block.sha256
