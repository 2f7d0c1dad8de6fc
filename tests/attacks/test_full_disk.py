"""If a disk is full, health and refusals name it, and reading goes on. Real API processes.

As root, the disk is a small tmpfs that the test fills. Otherwise, it is a limit on the size of the files of
the process, which has the same effect.
"""

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.running_service import Running, running_service

MIB = 1 << 20


def mounted(folder: Path) -> bool:
    """Make a folder and mount a small disk there. Return whether the mount succeeded."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Make a disk of 8 MiB at `folder` and yield True. If this process may not mount one, yield False."""
    is_disk = mounted(folder)
    try:
        yield is_disk
    finally:
        if is_disk:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb") as file:
        try:
            for size in (MIB, 4096, 1):
                while True:
                    file.write(bytes(size))
                    file.flush()
        except OSError:
            pass
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


@contextmanager
def full(running: Running, disk: Path, *, is_disk: bool) -> Iterator[None]:
    """Fill the disk. If it is only a folder, limit the API's files instead."""
    if is_disk:
        fill(disk)
        yield
        (disk / "filler").unlink()
        return
    pid = running.api_pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def health(running: Running) -> tuple[int, str]:
    """Return the status and the text of health after its cached answer has expired."""
    time.sleep(2.1)
    answer = httpx.get(f"{running.url}/v1/health", timeout=60.0, trust_env=False)
    return answer.status_code, answer.json().get("detail", answer.json().get("status"))


def words(where: str, *, is_disk: bool) -> Callable[[str], bool]:
    """Return a check for the words by which the service reports this full disk, or the limit."""
    if is_disk:
        return lambda text: text == f"the disk of the {where} is full"
    return lambda text: "cannot be written" in text


@pytest.mark.slow
@pytest.mark.attack(11, "fills the disk of the blob store")
def test_health_says_that_the_blobs_disk_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk) as is_disk:
        blobs = str(disk / "blobs")
        with running_service(tmp_path, "--no-worker", PERMILLE_BLOB_ROOT=blobs) as running:
            assert health(running) == (200, "ok")
            with full(running, disk, is_disk=is_disk):
                status, told = health(running)
                assert status == 503
                assert words("blob store", is_disk=is_disk)(told), told
                with running.client() as client:
                    assert client.get("/v1/models").status_code == 200
            assert health(running) == (200, "ok")


@pytest.mark.slow
@pytest.mark.attack(11, "fills the disk of the database")
def test_refusals_name_the_databases_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk) as is_disk:
        url = f"sqlite:///{disk / 'permille.db'}"
        up = running_service(tmp_path, "--no-worker", PERMILLE_DATABASE_URL=url)
        with up as running, running.client() as client:
            assert health(running) == (200, "ok")
            corpus = {"name": "c", "source": {"kind": "streamed", "dataset": "c4"}}
            with full(running, disk, is_disk=is_disk):
                for _ in range(1000):  # Write until the write-ahead log is full as well.
                    refused = client.post("/v1/corpora", json=corpus)
                    if refused.status_code != 201:
                        break
                assert refused.status_code == 503
                assert words("database", is_disk=is_disk)(refused.json()["detail"]), refused.text
                assert client.get("/v1/corpora").status_code == 200
                status, told = health(running)
                assert status == 503
                assert words("database", is_disk=is_disk)(told) or words("blob store", is_disk=False)(told), (
                    told
                )
            assert client.post("/v1/corpora", json=corpus).status_code == 201
            assert health(running) == (200, "ok")
