"""Tests of downloads: after any fault, the blob is absent or correct, and a cut download continues."""

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from permille.digests import digest_of
from permille.errors import OperatorError, PackageError
from permille.package.blobs import BlobFolder
from permille_agent.link import download
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import ServiceUnavailableError
from permille_agent.link.download import Download
from permille_agent.state.home import Home
from tests.device_service import DeviceService, Fault, serving

PACKAGE = "sha256:" + "0" * 64
DATA = random.Random(7).randbytes(100_000)
DIGEST = digest_of(DATA)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[DeviceService]:
    """Yield a service with one blob of 100,000 bytes."""
    BlobFolder(tmp_path / "published").put_bytes(DATA)
    with serving(tmp_path / "published") as running:
        yield running


@dataclass(frozen=True)
class Device:
    home: Home
    api: DeviceApi

    def download(self, **changes: Any) -> None:
        asked: dict[str, Any] = {
            "package_digest": PACKAGE,
            "digest": DIGEST,
            "size_bytes": len(DATA),
            **changes,
        }
        Download(self.api, self.blobs, self.home.partial, **asked).run()

    @property
    def blobs(self) -> BlobFolder:
        return BlobFolder(self.home.blobs)

    @property
    def part(self) -> Path:
        return self.home.partial / f"{DIGEST.removeprefix('sha256:')}.part"

    @property
    def etag(self) -> Path:
        return self.part.with_suffix(".etag")


@pytest.fixture
def device(home: Home, api: DeviceApi, monkeypatch: pytest.MonkeyPatch) -> Device:
    # On a busy machine, an attempt must not count as too slow.
    monkeypatch.setattr(download, "LEAST_RATE", 1)
    return Device(home, api)


def test_a_blob_arrives_once_and_leaves_nothing_behind(device: Device, service: DeviceService) -> None:
    device.download()
    assert device.blobs.path(DIGEST).read_bytes() == DATA
    assert list(device.home.partial.iterdir()) == []
    asked = len(service.requests)
    device.download()
    assert len(service.requests) == asked


CUT = Fault(path="blobs", cut_after=40_000)
BUSY = {"retry-after": "1"}


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(path="blobs", cut_after=4_000, times=20)],
        [Fault(path="blobs", cut_after=50_000), Fault(path="blobs", ignore_range=True)],
        [Fault(path="blobs", flip_byte=77_777)],
        [Fault(path="blobs", status=503, headers=BUSY), CUT, Fault(path="blobs", status=429)],
        [CUT, Fault(path="blobs", status=401)],
        [Fault(path="blobs", status=401), CUT, Fault(path="blobs", status=401)],
    ],
    ids=[
        "many cuts",
        "a server that ignores ranges",
        "wrong bytes once",
        "a busy server",
        "an ended token",
        "two ended tokens",
    ],
)
def test_what_goes_wrong_on_the_way_costs_bytes_only(
    device: Device, service: DeviceService, faults: list[Fault]
) -> None:
    service.faults = [replace(fault) for fault in faults]
    added: list[int] = []
    device.download(progress=added.append)
    assert device.blobs.path(DIGEST).read_bytes() == DATA
    assert sum(added) == len(DATA)
    assert not any(fault.times for fault in service.faults)
    if service.faults[-1].ignore_range:
        # The server starts from the beginning, so the progress goes back.
        assert min(added) == -50_000


@pytest.mark.attack(9, "a download of which each connection brings a byte")
def test_a_download_that_gets_nowhere_ends(
    device: Device, service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No attempt is this fast, so each one counts as a failure.
    monkeypatch.setattr(download, "LEAST_RATE", 1 << 30)
    service.faults = [Fault(path="blobs", cut_after=1, times=99)]
    with pytest.raises(ServiceUnavailableError):
        device.download()
    assert sum(fault.times for fault in service.faults) > 80


def test_a_cut_connection_is_continued_where_it_broke(device: Device, service: DeviceService) -> None:
    service.faults = [Fault(path="blobs", cut_after=n) for n in (10_000, 20_000, 1, 30_000)]
    device.download()
    assert device.blobs.path(DIGEST).read_bytes() == DATA
    starts = [int(text.removeprefix("bytes=").rstrip("-") or 0) for text in service.ranges]
    assert starts == [0, 10_000, 30_000, 30_001, 60_001]
    assert service.blob_bytes_sent == len(DATA)


def test_a_connection_that_brings_nothing_is_given_up_and_keeps_the_part(
    device: Device, service: DeviceService
) -> None:
    service.faults = [Fault(path="blobs", cut_after=10_000), Fault(path="blobs", cut_after=0, times=99)]
    with pytest.raises(ServiceUnavailableError):
        device.download()
    assert device.part.read_bytes() == DATA[:10_000]
    service.faults = []
    device.download()
    assert device.blobs.path(DIGEST).read_bytes() == DATA
    assert service.blob_bytes_sent == len(DATA)


@pytest.mark.parametrize(
    ("size", "etag"),
    [(5_000, '"another"'), (5_000, None), *((n, f'"{DIGEST}"') for n in (4_096, 100_000, 100_001, 250_000))],
)
def test_a_part_that_is_not_of_this_blob_is_found_out(
    device: Device, service: DeviceService, size: int, etag: str | None
) -> None:
    device.part.write_bytes(b"?" * size)
    if etag:
        device.etag.write_text(etag)
    device.download()
    assert device.blobs.path(DIGEST).read_bytes() == DATA
    if etag == '"another"':
        assert service.blob_bytes_sent == len(DATA)


@pytest.mark.parametrize(
    ("code", "fault"), [("blob-digest", {"flip_byte": 77_777}), ("blob-size", {"extra": b"x" * 1_000_000})]
)
def test_wrong_bytes_twice_are_refused(
    device: Device, service: DeviceService, code: str, fault: dict[str, Any]
) -> None:
    service.faults = [Fault(path="blobs", times=2, **fault)]
    with pytest.raises(PackageError) as refused:
        device.download()
    assert refused.value.code == code
    assert not device.blobs.has(DIGEST)
    assert not device.part.exists()


def test_fewer_bytes_than_the_manifest_names_are_never_installed(device: Device) -> None:
    with pytest.raises(PackageError, match="instead of 100001 bytes"):
        device.download(size_bytes=len(DATA) + 1)
    assert not device.blobs.has(DIGEST)


def test_a_long_pause_is_handed_to_the_caller(device: Device, service: DeviceService) -> None:
    busy = Fault(path="blobs", status=503, headers={"retry-after": "7200"})
    service.faults = [Fault(path="blobs", cut_after=40_000), busy]
    with pytest.raises(ServiceUnavailableError) as refused:
        device.download()
    assert refused.value.retry_after_s == 7200.0
    assert device.part.stat().st_size == 40_000


def test_a_full_disk_keeps_what_was_downloaded(
    device: Device, service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.faults = [Fault(path="blobs", cut_after=40_000)]
    real_open = Path.open

    def open_full(self: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if mode == "ab" and self.exists() and self.stat().st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_open(self, mode, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", open_full)
        with pytest.raises(OperatorError, match=r"is full.*the download is kept"):
            device.download()
    assert device.part.read_bytes() == DATA[:40_000]
    device.download()
    assert device.blobs.path(DIGEST).read_bytes() == DATA
    assert service.blob_bytes_sent < 2 * len(DATA)


def test_an_empty_blob_is_a_blob(device: Device, service: DeviceService) -> None:
    empty = service.blobs.put_bytes(b"")
    device.download(digest=empty, size_bytes=0)
    assert device.blobs.size(empty) == 0
