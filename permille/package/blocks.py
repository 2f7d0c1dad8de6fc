"""Hashes of the big layers (`dense` and `plain`) in blocks of 1 MiB (FORMAT 4.7), so that damage can be
located and repaired.

The layer `blocks` lists the SHA-256 of each block of `dense`, then of `plain`. `Package` checks all
blocks, in several threads, before it returns the first tensor of these layers. So a flipped bit is found
before anything is computed with it. Damage that comes later is found by the next process, or by a caller
of `damaged_blocks`.

A Merkle tree was considered. It would help only readers without the whole list of hashes, and every
reader has the list.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import BLOCK_BYTES, BLOCK_HASH_BYTES, BLOCKED_ROLES, Role
from permille.package.manifest import Layer, Manifest
from permille.system import read_at, set_mode

# Threads help, since hashlib releases the interpreter lock. On a small machine, two of them already saturate
# the memory bandwidth.
_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of a big layer with its expected SHA-256. `begin` and `end` are offsets in the blob."""

    layer: Layer
    begin: int
    end: int
    sha256: bytes

    def __str__(self) -> str:
        """Describe the block for messages."""
        return f"bytes {self.begin} to {self.end - 1} of {self.layer.role} {self.layer.digest}"


def write_blocks(blobs: BlobFolder, layers: Iterable[Layer]) -> Layer:
    """Hash the blocks of the big layers, and store the list of hashes. Other layers are ignored.

    Raises:
        OSError: from the file system.
    """
    big = [layer for layer in layers if layer.role in BLOCKED_ROLES]
    # FORMAT 4.7: the list begins with the blocks of `dense`.
    big.sort(key=lambda layer: BLOCKED_ROLES.index(layer.role))
    listed = bytearray()
    for layer in big:
        with blobs.open(layer.digest) as file:
            while data := file.read(BLOCK_BYTES):
                listed += hashlib.sha256(data).digest()
    return Layer(role=Role.BLOCKS, digest=blobs.put_bytes(bytes(listed)), size_bytes=len(listed))


def package_blocks(blobs: BlobFolder, manifest: Manifest) -> list[Block]:
    """Return the blocks of a package's big layers.

    Raises:
        PackageError: `blob-missing`, `blob-size` or `blob-digest` of the list itself.
    """
    listing = manifest.layer(Role.BLOCKS)
    listed = blobs.read(listing.digest, limit=listing.size_bytes)
    blocks: list[Block] = []
    for role in BLOCKED_ROLES:
        layer = manifest.layer(role)
        for begin in range(0, layer.size_bytes, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, layer.size_bytes)
            position = len(blocks) * BLOCK_HASH_BYTES
            sha256 = listed[position : position + BLOCK_HASH_BYTES]
            blocks.append(Block(layer=layer, begin=begin, end=end, sha256=sha256))
    return blocks


def check_blocks(blobs: BlobFolder, blocks: Sequence[Block]) -> None:
    """Hash the stored bytes of these blocks.

    Raises:
        PackageError: `block-digest`. The message names the first damaged block and counts the
            others.
    """
    if damaged := damaged_blocks(blobs, blocks):
        others = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise PackageError("block-digest", f"The package is damaged: {damaged[0]}{others}. Fetch it again.")


def damaged_blocks(blobs: BlobFolder, blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks whose stored bytes are missing, or have another hash than the expected one.

    Raises:
        PackageError: `blob-missing`.
    """
    # One descriptor per layer serves all threads, since `pread` moves no position.
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
    """Restore the bytes of a block in place. Processes that have mapped the blob see the restored bytes.

    Raises:
        PackageError: `block-digest` if these are not the block's bytes. Nothing is written then.
        OSError: from the file system.
    """
    if hashlib.sha256(data).digest() != block.sha256:
        raise PackageError("block-digest", f"The fetched copy of {block} is damaged, too. Fetch it again.")
    path = blobs.path(block.layer.digest)
    # Blobs are read-only, to protect them from mistakes, so make this one writable for a moment.
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(block.begin)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        set_mode(file.fileno(), 0o444)


def _is_whole(handle: int, block: Block) -> bool:
    # A truncated file gives fewer bytes, whose hash differs, too.
    data = read_at(handle, block.end - block.begin, block.begin)
    return hashlib.sha256(data).digest() == block.sha256
