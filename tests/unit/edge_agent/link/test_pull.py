"""From alias to installed package: what is refused, what is kept, what is fetched, what is thrown away."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from permille.errors import OperatorError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille.package.reader import Package
from permille.package.signing import generate_key
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import ServiceUnavailableError
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.pull import Pulled, collect_garbage, pull
from permille_agent.state.home import Home
from permille_agent.state.models import (
    Active,
    activate,
    active_model,
    installed_release,
    opening,
    read_releases,
)
from tests.device_service import DeviceService, Fault, serving
from tests.packages import tiny_package
from tests.unit.edge_agent.conftest import fast_connection

NOW_S = 1_800_000_000


@pytest.fixture(scope="module")
def second(package: Package) -> Package:
    """Another package in the same folder: the same model under another mask and seed."""
    return tiny_package(package.blobs.root, seed=1)


@dataclass(frozen=True)
class Device:
    home: Home
    api: DeviceApi
    enrolment: Enrolment
    service: DeviceService

    @property
    def blobs(self) -> BlobFolder:
        return BlobFolder(self.home.blobs)

    def pull(self) -> Pulled:
        return pull(self.home, self.api, self.enrolment, now_s=NOW_S)

    def refusal(self) -> str:
        with pytest.raises(PackageError) as refused:
            self.pull()
        return refused.value.code


@pytest.fixture
def device(home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService) -> Device:
    return Device(home, api, enrolment, service)


def test_a_package_is_installed_and_opens_and_a_second_pull_fetches_nothing(
    device: Device, package: Package
) -> None:
    result = device.pull()
    assert result.changed
    assert result.release.version == 1
    assert result.download_bytes == sum({x.digest: x.size_bytes for x in package.manifest.layers}.values())
    assert Package.open(device.blobs, result.release.manifest_digest).k == package.k
    assert list(device.home.partial.iterdir()) == []
    sent = device.service.blob_bytes_sent
    again = device.pull()
    assert (again.changed, again.download_bytes, device.service.blob_bytes_sent) == (False, 0, sent)


def test_only_what_changed_is_fetched(device: Device, package: Package, second: Package) -> None:
    device.pull()
    device.service.publish(second.digest, 2)
    have = {layer.digest for layer in package.manifest.layers}
    missing = sum(layer.size_bytes for layer in second.manifest.layers if layer.digest not in have)
    assert device.pull().download_bytes == missing
    assert any(layer.digest in have for layer in second.manifest.layers)


def test_an_older_version_is_refused_and_what_is_installed_stays(
    device: Device, package: Package, second: Package
) -> None:
    device.service.publish(second.digest, 5)
    device.pull()
    device.service.publish(package.digest, 4)
    assert device.refusal() == "release-rollback"
    installed = installed_release(device.home)
    assert installed is not None and installed.version == 5
    device.service.publish(package.digest, 5)
    assert device.refusal() == "release-changed"


def test_a_version_counts_from_the_moment_it_was_accepted(
    device: Device, package: Package, second: Package
) -> None:
    device.service.publish(second.digest, 5)
    device.service.faults = [Fault(path="blobs", status=503, headers={"retry-after": "900"}, times=99)]
    with pytest.raises(ServiceUnavailableError):
        device.pull()
    assert installed_release(device.home) is None
    assert read_releases(device.home).last_versions[device.enrolment.release].version == 5
    device.service.publish(package.digest, 4)
    assert device.refusal() == "release-rollback"


def test_releases_that_are_not_to_be_believed_are_refused_before_anything_is_fetched(
    device: Device, package: Package
) -> None:
    digest, service = package.digest, device.service
    pinned = {"key_id": device.enrolment.signing_keys[0].key_id}
    cases: list[tuple[str, Callable[[], None]]] = [
        ("release-expired", lambda: service.publish(digest, 1, expires_at=NOW_S)),
        ("release-key", lambda: service.publish(digest, 1, key=generate_key())),
        ("release-name", lambda: service.publish(digest, 1, name="another-model")),
        ("release-yanked", lambda: service.publish(digest, 1, yanked=True)),
        ("release-signature", lambda: service.publish(digest, 1, changes={"version": 2})),
        # A pinned key's id does not make a foreign signature hold.
        ("release-signature", lambda: service.publish(digest, 1, key=generate_key(), changes=pinned)),
    ]
    for code, publish in cases:
        publish()
        assert device.refusal() == code
    assert installed_release(device.home) is None
    assert read_releases(device.home).last_versions == {}
    assert not [path for _, path, _ in service.requests if "/packages/" in path]


def test_a_manifest_of_another_package_is_refused(device: Device, second: Package) -> None:
    other = device.service.blobs.read(second.digest, limit=1 << 20)
    device.service.faults = [Fault(path="manifest", status=200, body=other)]
    assert device.refusal() == "blob-digest"
    assert device.service.blob_bytes_sent == 0


def test_a_disk_that_is_too_small_is_found_before_the_download(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = shutil.disk_usage(device.home.root)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: small)
    with pytest.raises(OperatorError, match="free disk, got 1000"):
        device.pull()
    assert device.service.blob_bytes_sent == 0


def test_what_the_service_does_not_have_is_for_a_person(device: Device) -> None:
    device.service.faults = [Fault(path="blobs", status=404, times=99)]
    with pytest.raises(OperatorError, match="expected the files of tiny-llama 1"):
        device.pull()
    device.service.release = None
    with pytest.raises(OperatorError, match="expected a published release 'tiny-llama'"):
        device.pull()


def test_a_blob_that_went_bad_on_the_disk_is_fetched_again(device: Device, package: Package) -> None:
    device.pull()
    path = device.blobs.path(package.manifest.layer(Role.MASK).digest)
    path.chmod(0o600)
    path.write_bytes(bytes(path.stat().st_size))
    device.refusal()
    assert device.pull().download_bytes > 0
    assert Package.open(device.blobs, package.digest).mask_digest == package.mask_digest


def test_the_active_package_survives_a_new_one_and_an_unused_one_does_not(
    device: Device, package: Package, second: Package
) -> None:
    home, active = device.home, Active(package=package.digest, run="a-run")
    device.pull()
    activate(home, active, expected=active_model(home))
    device.service.publish(second.digest, 2)
    assert device.pull().collected_bytes == 0
    assert Package.open(device.blobs, package.digest).digest == package.digest
    assert active_model(home) == active

    home.current.unlink()
    with opening(home, second.digest):
        pass  # its first use
    assert collect_garbage(home, now_s=NOW_S) > 0
    assert not device.blobs.has(package.digest)
    assert Package.open(device.blobs, second.digest).digest == second.digest


def test_nothing_is_collected_where_a_manifest_in_use_cannot_be_read(
    device: Device, package: Package
) -> None:
    device.pull()
    stray = device.blobs.put_bytes(b"stray")
    path = device.blobs.path(package.digest)
    path.chmod(0o600)
    path.write_bytes(b"{}")
    assert collect_garbage(device.home, now_s=NOW_S) == 0
    assert device.blobs.has(stray)


def test_what_killed_writers_left_is_swept_once_it_is_old(device: Device) -> None:
    old, new = device.home.root / ".releases.json.abc.tmp", device.home.reports / ".x.json.abc.tmp"
    for path, age_s in ((old, 7200.0), (new, 60.0)):
        path.touch()
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    device.pull()
    assert (old.exists(), new.exists()) == (False, True)


def test_progress_ends_at_the_whole(device: Device) -> None:
    device.service.faults = [Fault(path="blobs", cut_after=100, times=3)]
    seen: list[tuple[int, int]] = []
    pull(device.home, device.api, device.enrolment, now_s=NOW_S, progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1] > 0
    assert all(done <= total for done, total in seen)


def test_another_service_that_answers_in_the_name_of_the_first_changes_nothing(
    device: Device, package: Package
) -> None:
    with serving(package.blobs.root) as impostor:
        impostor.devices = {"k": device.enrolment.device_id}
        impostor.publish(package.digest, 9)
        impostor.tokens["t"] = device.enrolment.device_id
        with fast_connection(impostor.url, None) as connection:
            foreign = DeviceApi(connection)
            foreign._authorization = lambda: {"authorization": "Bearer t"}  # type: ignore[method-assign]
            assert Device(device.home, foreign, device.enrolment, impostor).refusal() == "release-key"
