"""Tests of hashes by blocks: the contents of the list, detection of damage, and exact repair."""

import hashlib
from pathlib import Path

import pytest

from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.package.blocks import check_blocks, damaged_blocks, mend_block, package_blocks, write_blocks
from permille.package.limits import Role
from permille.package.manifest import Layer
from permille.package.reader import Package
from tests.unit.package.tiny import LLAMA, write_tiny

# Results of sha256sum for `head -c 1048576 /dev/zero`, and for one zero byte.
MEBIBYTE_OF_ZEROS = "30e14955ebf1352266dc2ff8067e68104607e750abb9d3b36582b8af909fcb58"
ONE_ZERO = "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"


@pytest.fixture
def package(tmp_path: Path) -> Package:
    blobs = BlobFolder(tmp_path)
    return Package.open(blobs, write_tiny(blobs, config=LLAMA | {"vocab_size": 9000}).digest)


def stored(blobs: BlobFolder, role: Role, data: bytes) -> Layer:
    return Layer(role=role, digest=blobs.put_bytes(data), size_bytes=len(data))


def test_the_list_is_the_hashes_of_dense_and_then_of_plain(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    plain = stored(blobs, Role.PLAIN, bytes(1))
    dense = stored(blobs, Role.DENSE, bytes((1 << 20) + 1))
    listed = write_blocks(blobs, [plain, stored(blobs, Role.MASK, b"small"), dense])
    expected = bytes.fromhex(MEBIBYTE_OF_ZEROS + ONE_ZERO + ONE_ZERO)
    assert blobs.read(listed.digest, limit=96) == expected
    assert (listed.role, listed.size_bytes) == (Role.BLOCKS, 96)


def test_blocks_cover_the_big_layers_without_a_hole(package: Package) -> None:
    blocks = package_blocks(package.blobs, package.manifest)
    for role in (Role.DENSE, Role.PLAIN):
        layer = package.manifest.layer(role)
        data = package.blobs.read(layer.digest, limit=layer.size_bytes)
        mine = [block for block in blocks if block.layer == layer]
        assert b"".join(data[block.begin : block.end] for block in mine) == data
        assert [hashlib.sha256(data[b.begin : b.end]).digest() for b in mine] == [b.sha256 for b in mine]
    assert len(blocks) == 4
    check_blocks(package.blobs, blocks)


def test_a_flip_and_a_cut_are_placed_and_mended_to_the_bit(package: Package) -> None:
    blobs, blocks = package.blobs, package_blocks(package.blobs, package.manifest)
    plain = package.manifest.layer(Role.PLAIN)
    whole = blobs.read(plain.digest, limit=plain.size_bytes)
    flipped = bytearray(whole)
    flipped[5] ^= 16
    path = blobs.path(plain.digest)
    path.chmod(0o644)
    path.write_bytes(flipped[:-1])
    damaged = damaged_blocks(blobs, blocks)
    assert [(block.layer, block.begin) for block in damaged] == [(plain, 0), (plain, 2 << 20)]
    with pytest.raises(PackageError, match=r"block-digest: .*bytes 0 to 1048575 of plain.*and 1 more"):
        check_blocks(blobs, blocks)
    for block in damaged:
        with pytest.raises(PackageError, match="block-digest"):
            mend_block(blobs, block, bytes(block.end - block.begin))
        mend_block(blobs, block, whole[block.begin : block.end])
    assert damaged_blocks(blobs, blocks) == []
    blobs.check(plain.digest)
    assert path.stat().st_mode & 0o777 == 0o444
