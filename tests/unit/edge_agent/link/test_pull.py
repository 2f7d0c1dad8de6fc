"""From alias to installed package: what is refused, what is kept, what is fetched, what is thrown away."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from permille.errors import OperatorError, PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille.package.reader import Package
from permille.package.signing import generate_key
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import ServiceUnavailableError
from permille_agent.link.enrolment import Enrolment, open_api
from permille_agent.link.pull import Pulled, collect_garbage, pull
from permille_agent.state.home import Home
from permille_agent.state.models import Active, activate, active_model, installed_release, read_releases
from tests.device_service import DeviceService, Fault, serving
from tests.packages import tiny_package
from tests.unit.edge_agent.conftest import fast_connection

NOW_S = 1_800_000_000


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, package: Package) -> Package:
    """Another package in the same folder: the same model under another mask and seed."""
    return tiny_package(package.blobs.root, seed=1)


@pytest.fixture
def api(home: Home, enrolment: Enrolment) -> Iterator[DeviceApi]:
    """The service, as the enrolled device."""
    opened = open_api(home, connection=fast_connection)
    with opened.connection:
        yield opened


def pulled(home: Home, api: DeviceApi, enrolment: Enrolment) -> Pulled:
    """One pull, now."""
    return pull(home, api, enrolment, now_s=NOW_S)


def test_a_package_is_installed_and_opens(
    home: Home, api: DeviceApi, enrolment: Enrolment, package: Package
) -> None:
    result = pulled(home, api, enrolment)
    assert result.changed
    assert result.release.version == 1
    assert result.download_bytes == sum({x.digest: x.size_bytes for x in package.manifest.layers}.values())
    assert Package.open(BlobFolder(home.blobs), result.release.manifest_digest).k == package.k
    assert list(home.partial.iterdir()) == []


def test_a_second_pull_fetches_nothing(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService
) -> None:
    pulled(home, api, enrolment)
    sent = service.blob_bytes_sent
    again = pulled(home, api, enrolment)
    assert (again.changed, again.download_bytes, service.blob_bytes_sent) == (False, 0, sent)


def test_only_what_changed_is_fetched(
    home: Home,
    api: DeviceApi,
    enrolment: Enrolment,
    service: DeviceService,
    package: Package,
    second: Package,
) -> None:
    pulled(home, api, enrolment)
    service.publish(second.digest, 2)
    have = {layer.digest for layer in package.manifest.layers}
    missing = sum(layer.size_bytes for layer in second.manifest.layers if layer.digest not in have)
    assert pulled(home, api, enrolment).download_bytes == missing
    assert any(layer.digest in have for layer in second.manifest.layers)


def test_an_older_version_is_refused_and_what_is_installed_stays(
    home: Home,
    api: DeviceApi,
    enrolment: Enrolment,
    service: DeviceService,
    package: Package,
    second: Package,
) -> None:
    service.publish(second.digest, 5)
    pulled(home, api, enrolment)
    service.publish(package.digest, 4)
    with pytest.raises(PackageError) as refused:
        pulled(home, api, enrolment)
    assert refused.value.code == "release-rollback"
    installed = installed_release(home)
    assert installed is not None
    assert installed.version == 5


def test_a_version_counts_from_the_moment_it_was_accepted(
    home: Home,
    api: DeviceApi,
    enrolment: Enrolment,
    service: DeviceService,
    package: Package,
    second: Package,
) -> None:
    service.publish(second.digest, 5)
    service.faults = [Fault(path="blobs", status=503, headers={"retry-after": "900"}, times=99)]
    with pytest.raises(ServiceUnavailableError):
        pulled(home, api, enrolment)
    assert installed_release(home) is None
    assert read_releases(home).last_versions[enrolment.release].version == 5
    service.publish(package.digest, 4)
    with pytest.raises(PackageError) as refused:
        pulled(home, api, enrolment)
    assert refused.value.code == "release-rollback"


def test_a_version_cannot_change_its_package(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService, second: Package
) -> None:
    pulled(home, api, enrolment)
    service.publish(second.digest, 1)
    with pytest.raises(PackageError) as refused:
        pulled(home, api, enrolment)
    assert refused.value.code == "release-changed"


def test_releases_that_are_not_to_be_believed_are_refused_before_anything_is_fetched(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService, package: Package
) -> None:
    digest = package.digest
    cases: dict[str, Callable[[], None]] = {
        "release-expired": lambda: service.publish(digest, 1, expires_at=NOW_S),
        "release-key": lambda: service.publish(digest, 1, key=generate_key()),
        "release-name": lambda: service.publish(digest, 1, name="another-model"),
        "release-yanked": lambda: service.publish(digest, 1, yanked=True),
        "release-signature": lambda: service.publish(digest, 1, changes={"version": 2}),
    }
    for code, publish in cases.items():
        publish()
        with pytest.raises(PackageError) as refused:
            pulled(home, api, enrolment)
        assert refused.value.code == code
    assert installed_release(home) is None
    assert read_releases(home).last_versions == {}
    assert not [path for _, path, _ in service.requests if "/packages/" in path]


def test_a_key_id_that_is_pinned_does_not_make_a_foreign_signature_hold(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService, package: Package
) -> None:
    pinned = enrolment.signing_keys[0].key_id
    service.publish(package.digest, 1, key=generate_key(), changes={"key_id": pinned})
    with pytest.raises(PackageError) as refused:
        pulled(home, api, enrolment)
    assert refused.value.code == "release-signature"


def test_a_manifest_of_another_package_is_refused(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService, second: Package
) -> None:
    other = service.blobs.read(second.digest, limit=1 << 20)
    service.faults = [Fault(path="manifest", status=200, body=other)]
    with pytest.raises(PackageError) as refused:
        pulled(home, api, enrolment)
    assert refused.value.code == "blob-digest"
    assert service.blob_bytes_sent == 0


def test_a_disk_that_is_too_small_is_found_before_the_download(
    home: Home,
    api: DeviceApi,
    enrolment: Enrolment,
    service: DeviceService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = shutil.disk_usage(home.root)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: small)
    with pytest.raises(OperatorError, match="free disk, got 1000"):
        pulled(home, api, enrolment)
    assert service.blob_bytes_sent == 0


def test_no_such_release_is_for_a_person(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService
) -> None:
    service.release = None
    with pytest.raises(OperatorError, match="expected a published release 'tiny-llama'"):
        pulled(home, api, enrolment)


def test_a_package_that_the_service_no_longer_serves_is_for_a_person(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService
) -> None:
    service.faults = [Fault(path="blobs", status=404, times=99)]
    with pytest.raises(OperatorError, match="expected the files of tiny-llama 1"):
        pulled(home, api, enrolment)


def test_a_blob_that_went_bad_on_the_disk_is_fetched_again(
    home: Home, api: DeviceApi, enrolment: Enrolment, package: Package
) -> None:
    pulled(home, api, enrolment)
    path = BlobFolder(home.blobs).path(package.manifest.layer(Role.MASK).digest)
    path.chmod(0o600)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(PackageError):
        pulled(home, api, enrolment)
    assert pulled(home, api, enrolment).download_bytes > 0
    assert Package.open(BlobFolder(home.blobs), package.digest).mask_digest == package.mask_digest


def test_the_active_package_survives_a_new_one_and_an_unused_one_does_not(
    home: Home,
    api: DeviceApi,
    enrolment: Enrolment,
    service: DeviceService,
    package: Package,
    second: Package,
) -> None:
    pulled(home, api, enrolment)
    activate(home, Active(package=package.digest, run="a-run"), expected=active_model(home))
    service.publish(second.digest, 2)
    kept = pulled(home, api, enrolment)
    blobs = BlobFolder(home.blobs)
    assert kept.collected_bytes == 0
    assert Package.open(blobs, package.digest).digest == package.digest
    assert active_model(home) == Active(package=package.digest, run="a-run")

    home.current.unlink()
    assert collect_garbage(home, now_s=NOW_S) > 0
    assert not blobs.has(package.digest)
    assert Package.open(blobs, second.digest).digest == second.digest


def test_nothing_is_collected_where_a_manifest_in_use_cannot_be_read(
    home: Home, api: DeviceApi, enrolment: Enrolment, package: Package
) -> None:
    pulled(home, api, enrolment)
    blobs = BlobFolder(home.blobs)
    stray = blobs.put_bytes(b"stray")
    path = blobs.path(package.digest)
    path.chmod(0o600)
    path.write_bytes(b"{}")
    assert collect_garbage(home, now_s=NOW_S) == 0
    assert blobs.has(stray)


def test_what_killed_writers_left_is_swept_once_it_is_old(
    home: Home, api: DeviceApi, enrolment: Enrolment
) -> None:
    old, new = home.root / ".releases.json.abc.tmp", home.reports / ".x.json.abc.tmp"
    for path, age_s in ((old, 7200.0), (new, 60.0)):
        path.touch()
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    pulled(home, api, enrolment)
    assert (old.exists(), new.exists()) == (False, True)


def test_progress_ends_at_the_whole(
    home: Home, api: DeviceApi, enrolment: Enrolment, service: DeviceService
) -> None:
    service.faults = [Fault(path="blobs", cut_after=100, times=3)]
    seen: list[tuple[int, int]] = []
    pull(home, api, enrolment, now_s=NOW_S, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert all(done <= total for done, total in seen)


def test_an_unsigned_service_in_the_middle_changes_nothing(
    home: Home, api: DeviceApi, enrolment: Enrolment, package: Package, tmp_path: Path
) -> None:
    """Another service answers in the name of the first: its key is not the pinned one."""
    with serving(package.blobs.root) as impostor:
        impostor.devices = {"k": enrolment.device_id}
        impostor.publish(package.digest, 9)
        impostor.tokens["t"] = enrolment.device_id
        with fast_connection(impostor.url, None) as connection:
            foreign = DeviceApi(connection)
            foreign._authorization = lambda: {"authorization": "Bearer t"}  # type: ignore[method-assign]
            with pytest.raises(PackageError) as refused:
                pull(home, foreign, enrolment, now_s=NOW_S)
    assert refused.value.code == "release-key"
