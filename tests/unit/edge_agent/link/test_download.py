"""Downloads: whatever happens on the way, the blob is either absent or right, and nothing comes twice."""

import errno
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from permille.digests import digest_of
from permille.errors import OperatorError, PackageError
from permille.package.blobs import BlobFolder
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import ServiceUnavailableError
from permille_agent.link.download import Download
from permille_agent.link.enrolment import Enrolment, open_api
from permille_agent.state.home import Home
from tests.device_service import DeviceService, Fault, serving
from tests.unit.edge_agent.conftest import fast_connection

PACKAGE = "sha256:" + "0" * 64
DATA = random.Random(7).randbytes(100_000)
DIGEST = digest_of(DATA)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[DeviceService]:
    """A service with one blob of 100,000 bytes."""
    BlobFolder(tmp_path / "published").put_bytes(DATA)
    with serving(tmp_path / "published") as running:
        yield running


@pytest.fixture
def api(home: Home, enrolment: Enrolment) -> Iterator[DeviceApi]:
    """The service, as the enrolled device."""
    opened = open_api(home, connection=fast_connection)
    with opened.connection:
        yield opened


def download(home: Home, api: DeviceApi, **changes: Any) -> Download:
    """A download of the blob into the home folder."""
    arguments: dict[str, Any] = {
        "package_digest": PACKAGE,
        "digest": DIGEST,
        "size_bytes": len(DATA),
        **changes,
    }
    return Download(api, BlobFolder(home.blobs), home.partial, **arguments)


def part(home: Home) -> Path:
    """Where the unfinished blob lies."""
    return home.partial / f"{DIGEST.removeprefix('sha256:')}.part"


def installed(home: Home) -> bytes:
    """The blob's bytes."""
    return BlobFolder(home.blobs).path(DIGEST).read_bytes()


def test_a_blob_arrives_and_leaves_nothing_behind(home: Home, api: DeviceApi) -> None:
    download(home, api).run()
    assert installed(home) == DATA
    assert list(home.partial.iterdir()) == []


def test_a_blob_that_is_here_is_not_asked_for(home: Home, api: DeviceApi, service: DeviceService) -> None:
    BlobFolder(home.blobs).put_bytes(DATA)
    asked = len(service.requests)
    download(home, api).run()
    assert len(service.requests) == asked


def test_a_cut_connection_is_continued_where_it_broke(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    service.faults = [Fault(path="blobs", cut_after=n) for n in (10_000, 20_000, 1, 30_000)]
    download(home, api).run()
    assert installed(home) == DATA
    starts = [int(text.removeprefix("bytes=").rstrip("-") or 0) for text in service.ranges]
    assert starts == [0, 10_000, 30_000, 30_001, 60_001]
    assert service.blob_bytes_sent == len(DATA)


def test_many_cuts_are_no_failure_as_long_as_bytes_come(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    service.faults = [Fault(path="blobs", cut_after=4_000, times=20)]
    download(home, api).run()
    assert installed(home) == DATA


def test_a_connection_that_brings_nothing_is_given_up_and_keeps_the_part(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    service.faults = [Fault(path="blobs", cut_after=10_000), Fault(path="blobs", cut_after=0, times=99)]
    with pytest.raises(ServiceUnavailableError):
        download(home, api).run()
    assert part(home).read_bytes() == DATA[:10_000]
    service.faults = []
    download(home, api).run()
    assert installed(home) == DATA
    assert service.blob_bytes_sent == len(DATA)


def test_a_server_that_ignores_ranges_costs_bytes_only(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    service.faults = [Fault(path="blobs", cut_after=50_000), Fault(path="blobs", ignore_range=True)]
    download(home, api).run()
    assert installed(home) == DATA


def test_a_part_of_another_representation_is_not_continued(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    part(home).write_bytes(b"?" * 5_000)
    part(home).with_suffix(".etag").write_text('"another"')
    download(home, api).run()
    assert installed(home) == DATA
    assert service.blob_bytes_sent == len(DATA)


def test_a_part_without_its_tag_is_fetched_again(home: Home, api: DeviceApi) -> None:
    part(home).write_bytes(b"?" * 5_000)
    download(home, api).run()
    assert installed(home) == DATA


@pytest.mark.parametrize("size", [4_096, 100_000, 100_001, 250_000])
def test_a_damaged_part_is_found_out_by_the_digest(home: Home, api: DeviceApi, size: int) -> None:
    part(home).write_bytes(b"?" * size)
    part(home).with_suffix(".etag").write_text(f'"{DIGEST}"')
    download(home, api).run()
    assert installed(home) == DATA


def test_wrong_bytes_once_are_fetched_again(home: Home, api: DeviceApi, service: DeviceService) -> None:
    service.faults = [Fault(path="blobs", flip_byte=77_777)]
    download(home, api).run()
    assert installed(home) == DATA


def test_wrong_bytes_twice_are_refused(home: Home, api: DeviceApi, service: DeviceService) -> None:
    service.faults = [Fault(path="blobs", flip_byte=77_777, times=2)]
    with pytest.raises(PackageError) as refused:
        download(home, api).run()
    assert refused.value.code == "blob-digest"
    assert not BlobFolder(home.blobs).has(DIGEST)
    assert not part(home).exists()


def test_more_bytes_than_the_manifest_names_are_refused(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    service.faults = [Fault(path="blobs", extra=b"x" * 1_000_000, times=2)]
    with pytest.raises(PackageError) as refused:
        download(home, api).run()
    assert refused.value.code == "blob-size"
    assert not part(home).exists()


def test_fewer_bytes_than_the_manifest_names_are_never_installed(home: Home, api: DeviceApi) -> None:
    with pytest.raises(PackageError, match="blob-size: expected 100001 bytes"):
        download(home, api, size_bytes=len(DATA) + 1).run()
    assert not BlobFolder(home.blobs).has(DIGEST)


def test_a_busy_server_is_waited_for(home: Home, api: DeviceApi, service: DeviceService) -> None:
    service.faults = [
        Fault(path="blobs", status=503, headers={"retry-after": "1"}),
        Fault(path="blobs", cut_after=40_000),
        Fault(path="blobs", status=429),
    ]
    download(home, api).run()
    assert installed(home) == DATA


def test_a_long_pause_is_handed_to_the_caller(home: Home, api: DeviceApi, service: DeviceService) -> None:
    service.faults = [
        Fault(path="blobs", cut_after=40_000),
        Fault(path="blobs", status=503, headers={"retry-after": "7200"}),
    ]
    with pytest.raises(ServiceUnavailableError) as busy:
        download(home, api).run()
    assert busy.value.retry_after_s == 7200.0
    assert part(home).stat().st_size == 40_000


def test_a_token_that_ends_in_the_middle_is_renewed(
    home: Home, api: DeviceApi, service: DeviceService
) -> None:
    service.faults = [Fault(path="blobs", cut_after=40_000), Fault(path="blobs", status=401)]
    download(home, api).run()
    assert installed(home) == DATA


def test_a_full_disk_keeps_what_was_downloaded(
    home: Home, api: DeviceApi, service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.faults = [Fault(path="blobs", cut_after=40_000)]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    real_open = Path.open

    def open_full(self: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if mode == "ab" and self.exists() and self.stat().st_size:
            raise full
        return real_open(self, mode, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", open_full)
        with pytest.raises(OperatorError, match="full; the download is kept"):
            download(home, api).run()
    assert part(home).read_bytes() == DATA[:40_000]
    download(home, api).run()
    assert installed(home) == DATA
    assert service.blob_bytes_sent < 2 * len(DATA)


def test_an_empty_blob_is_a_blob(home: Home, api: DeviceApi, service: DeviceService) -> None:
    empty = "sha256:" + hashlib.sha256(b"").hexdigest()
    service.blobs.put_bytes(b"")
    download(home, api, digest=empty, size_bytes=0).run()
    assert BlobFolder(home.blobs).size(empty) == 0


def test_progress_adds_up_to_the_size(home: Home, api: DeviceApi, service: DeviceService) -> None:
    service.faults = [Fault(path="blobs", cut_after=50_000), Fault(path="blobs", ignore_range=True)]
    added: list[int] = []
    download(home, api, progress=added.append).run()
    assert sum(added) == len(DATA)
    assert min(added) == -50_000
