"""Tests of blobs: they are complete or absent, even if their writer dies."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from permille.errors import PackageError
from permille.package.blobs import BlobFolder, BlobWriter

HELLO = "sha256:" + hashlib.sha256(b"hello").hexdigest()
OTHER = "sha256:" + hashlib.sha256(b"other").hexdigest()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path / "blobs")


def everything(blobs: BlobFolder) -> list[Path]:
    return [path for path in blobs.root.rglob("*") if path.is_file()]


def test_a_blob_lies_where_format_says_and_cannot_be_written(blobs: BlobFolder, tmp_path: Path) -> None:
    assert blobs.put_bytes(b"hello") == HELLO
    path = blobs.root / "sha256" / HELLO[7:9] / HELLO[7:]
    assert path.read_bytes() == b"hello" and path.stat().st_mode & 0o777 == 0o444
    (entry,) = blobs.entries()
    assert blobs.entry(HELLO) == entry and blobs.entry(OTHER) is None
    assert (blobs.has(HELLO), blobs.size(HELLO), entry.digest, entry.size_bytes) == (True, 5, HELLO, 5)
    os.utime(path, (1e9, 1e9))
    assert everything(blobs) == [path]
    (tmp_path / "file").write_bytes(b"hello")
    assert blobs.put_bytes(b"hello") == blobs.put_file(tmp_path / "file", expected=HELLO) == HELLO
    assert everything(blobs) == [path]
    assert entry.written_at_s > 1e9 < next(blobs.entries()).written_at_s, "a blob put again is young again"


def test_a_store_below_is_listed_and_erased_apart(blobs: BlobFolder) -> None:
    below = blobs.below("uploads", "upl_1")
    below.put_bytes(b"hello")
    assert list(blobs.entries()) == [] and [blob.digest for blob in below.entries()] == [HELLO]
    assert (blobs.below("uploads").names(), blobs.below("none").names()) == (["upl_1"], [])
    below.erase()
    below.erase()
    assert blobs.below("uploads").names() == []
    for name in ("", "..", "a/b", "a.b"):
        with pytest.raises(ValueError, match="expected a name"):
            blobs.below(name)


def test_a_writer_hashes_what_it_is_given_in_pieces(blobs: BlobFolder) -> None:
    with blobs.writer() as writer:
        for piece in (b"he", bytearray(b"l"), memoryview(b"lo")):
            writer.write(piece)
        assert not blobs.has(HELLO)
        assert (writer.commit(HELLO), writer.size_bytes) == (HELLO, 5)
    with blobs.open(HELLO) as file:
        assert file.read() == b"hello"


def test_bytes_of_another_digest_and_a_writer_that_is_left_leave_nothing(blobs: BlobFolder) -> None:
    with pytest.raises(PackageError, match="blob-digest"):
        blobs.put_bytes(b"other", expected=HELLO)
    with pytest.raises(RuntimeError), blobs.writer() as writer:
        writer.write(b"half")
        raise RuntimeError
    assert everything(blobs) == []


@pytest.mark.parametrize(("owner", "name"), [(BlobWriter, "write"), (os, "fsync")])
def test_a_full_disk_leaves_nothing(
    blobs: BlobFolder, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(OSError, match="No space left"):
        blobs.put_bytes(b"hello")
    assert everything(blobs) == []


def test_a_killed_writer_leaves_no_blob_and_what_it_leaves_is_swept(blobs: BlobFolder) -> None:
    script = """
import sys, time
from pathlib import Path
from permille.package.blobs import BlobFolder
with BlobFolder(Path(sys.argv[1])).writer() as writer:
    writer.write(b"x" * 100_000)
    print("writing", flush=True)
    time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", script, str(blobs.root)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert list(blobs.entries()) == []
    (left,) = everything(blobs)
    assert blobs.sweep(before_s=left.stat().st_mtime - 1) == 0
    assert blobs.sweep(before_s=left.stat().st_mtime + 1) == 1
    assert everything(blobs) == []


def test_a_download_is_adopted_without_a_copy_and_a_wrong_one_stays(
    blobs: BlobFolder, tmp_path: Path
) -> None:
    part = tmp_path / "download.part"
    part.write_bytes(b"hellp")
    with pytest.raises(PackageError, match="blob-digest"):
        blobs.adopt_file(part, HELLO)
    assert part.read_bytes() == b"hellp" and not blobs.has(HELLO)
    part.write_bytes(b"hello")
    inode = part.stat().st_ino
    assert blobs.adopt_file(part, HELLO) == HELLO
    assert blobs.path(HELLO).stat().st_ino == inode and not part.exists()


def test_an_unnamed_file_becomes_the_blob_without_a_copy(blobs: BlobFolder) -> None:
    try:
        descriptor = os.open(blobs.incoming(), os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as exc:
        pytest.skip(f"the file system has no unnamed files: {exc}")
    with os.fdopen(descriptor, "r+b") as file:
        file.write(b"hello")
        file.flush()
        assert blobs.put_unnamed(file) == HELLO
        assert blobs.path(HELLO).stat().st_ino == os.fstat(file.fileno()).st_ino
    assert everything(blobs) == [blobs.path(HELLO)]


@pytest.mark.parametrize(
    "text", ["", "hello", HELLO[:-1], HELLO.upper(), HELLO + "\n", "sha256:" + "../" * 22]
)
def test_a_path_is_made_from_a_digest_or_not_at_all(blobs: BlobFolder, text: str) -> None:
    with pytest.raises(PackageError, match="digest-malformed"):
        blobs.path(text)


def test_reading_checks_limit_and_digest(blobs: BlobFolder) -> None:
    blobs.put_bytes(b"hello")
    assert blobs.read(HELLO, limit=5) == b"hello"
    with pytest.raises(PackageError, match="blob-size"):
        blobs.read(HELLO, limit=4)
    blobs.path(HELLO).chmod(0o644)
    blobs.path(HELLO).write_bytes(b"jello")
    for read in (lambda: blobs.read(HELLO, limit=5), lambda: blobs.check(HELLO)):
        with pytest.raises(PackageError, match="blob-digest"):
            read()


def test_the_folders_of_a_first_blob_are_durable(blobs: BlobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("permille.package.blobs.fsync_folder", synced.append)
    blobs.put_bytes(b"hello")
    folder = blobs.path(HELLO).parent
    assert {blobs.root, folder.parent, folder} <= set(synced)


def test_a_blob_that_was_deleted_is_missing(blobs: BlobFolder) -> None:
    blobs.put_bytes(b"hello")
    blobs.delete(HELLO)
    blobs.delete(HELLO)
    for read in (lambda: blobs.size(HELLO), lambda: blobs.open(HELLO).close(), lambda: blobs.check(HELLO)):
        with pytest.raises(PackageError, match="blob-missing"):
            read()
