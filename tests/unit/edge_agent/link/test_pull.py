"""Tests of pulling: resolving an alias, checks, downloads, installation and garbage collection."""

import json
import os
import shutil
from pathlib import Path

import pytest

from permille.errors import OperatorError, PackageError
from permille.package.limits import Role
from permille.package.reader import Package
from permille_agent.link import pull as module
from permille_agent.link.api import DeviceApi
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.install import try_package
from permille_agent.link.pull import collect_garbage, pull
from permille_agent.link.verify import verify
from permille_agent.state.home import Home
from permille_agent.state.models import (
    Active,
    activate,
    active_model,
    installed_release,
    opening,
)
from tests.device_service import DeviceService, Fault
from tests.enrolled import NOW_S, Device
from tests.packages import program_package, tiny_package


@pytest.fixture(scope="module")
def second(package: Package) -> Package:
    """Return another package in the same folder: the same model with another mask and seed."""
    return tiny_package(package.blobs.root, seed=1)


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


def test_a_package_is_tried_below_a_folder_whose_name_is_not_utf_8(package: Package, tmp_path: Path) -> None:
    folder = shutil.copytree(package.blobs.root, tmp_path / "mod\udce9les")
    try_package(folder, package.digest, size_bytes=package.size_bytes)
    shutil.rmtree(folder)  # the child read this folder, because without it the trial fails
    with pytest.raises(PackageError):
        try_package(folder, package.digest, size_bytes=package.size_bytes)


def test_only_what_changed_is_fetched(device: Device, package: Package, second: Package) -> None:
    device.pull()
    device.service.publish(second.digest, 2)
    have = {layer.digest for layer in package.manifest.layers}
    missing = sum(layer.size_bytes for layer in second.manifest.layers if layer.digest not in have)
    assert device.pull().download_bytes == missing
    assert any(layer.digest in have for layer in second.manifest.layers)


def test_a_program_is_fetched_where_its_runtime_is_and_does_not_stay_untried(
    device: Device, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = program_package(package)
    layer = child.manifest.layer(Role.PROGRAM)
    device.service.publish(child.digest, 2)
    device.pull()
    assert not device.blobs.has(layer.digest)
    assert Package.open(device.blobs, child.digest).k == package.k
    assert verify(device.home).damaged == []
    monkeypatch.setattr(module, "programs_run_here", lambda: True)
    tried: list[str] = []

    def refuses(_blobs: Path, digest: str, *, size_bytes: int) -> None:
        assert device.blobs.has(layer.digest) and size_bytes == child.manifest.size_bytes
        tried.append(digest)
        raise PackageError("package-trial", "no")

    with monkeypatch.context() as patch:
        patch.setattr(module, "try_package", refuses)
        assert device.refusal() == "package-trial"
    assert tried == [child.digest] and not device.blobs.has(layer.digest)
    assert device.pull().download_bytes == layer.size_bytes
    assert Package.open(device.blobs, child.digest).program() == device.blobs.path(layer.digest)
    assert device.pull().download_bytes == 0


def test_an_operator_may_point_back_to_a_version_that_is_listed(
    device: Device, package: Package, second: Package
) -> None:
    device.pull()
    device.service.publish(second.digest, 2)
    assert device.pull().release.version == 2
    device.service.repository.move_alias(device.enrolment.release, "stable", 1)
    device.service.keep_metadata()
    device.service.point(package.digest, 1)
    back = device.pull()
    assert (back.changed, back.release.version) == (True, 1)
    assert installed_release(device.home) == back.release


def test_a_disk_that_is_too_small_is_found_before_the_download(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = shutil.disk_usage(device.home.root)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: small)
    stale = device.home.partial / f"{'f' * 64}.part"
    stale.write_bytes(bytes(500))
    with pytest.raises(OperatorError, match=" 1000 free"):
        device.pull()
    assert device.service.blob_bytes_sent == 0
    assert not stale.exists(), "it belongs to another package, so it is not reused"


def test_what_the_service_does_not_have_is_for_a_person(device: Device) -> None:
    device.service.faults = [Fault(path="blobs", status=404, times=99)]
    with pytest.raises(OperatorError, match="The service lacks files of tiny-llama 1"):
        device.pull()
    device.service.release = None
    with pytest.raises(OperatorError, match="No release 'tiny-llama' is published"):
        device.pull()


@pytest.mark.parametrize("role", [Role.MASK, Role.DENSE])
def test_a_blob_that_went_bad_on_the_disk_is_mended(device: Device, package: Package, role: Role) -> None:
    device.pull()
    path = device.blobs.path(package.manifest.layer(role).digest)
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(bytes(len(whole)))
    assert not device.pull().changed
    assert path.read_bytes() == whole
    assert Package.open(device.blobs, package.digest).mask_digest == package.mask_digest


def test_the_active_package_survives_a_new_one_and_an_unused_one_does_not(
    device: Device, package: Package, second: Package
) -> None:
    home, active = device.home, Active(package=package.digest, run="a-run")
    device.pull()
    activate(home, active, expected=active_model(home))
    device.service.publish(second.digest, 2)
    assert device.pull().space_freed_bytes == 0
    assert Package.open(device.blobs, package.digest).digest == package.digest
    assert active_model(home) == active

    home.current.unlink()
    with opening(home, second.digest):
        pass  # the first use of the new package releases the old one
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


def changed_tokenizer(package: Package, normalizer: dict[str, object]) -> Package:
    """Return a package that differs from `package` in the normalizer of its tokenizer."""
    document = json.loads(package.file("tokenizer.json"))
    document["normalizer"] = normalizer
    return tiny_package(package.blobs.root, files={"tokenizer.json": json.dumps(document).encode()})


@pytest.mark.attack(
    23, "a later version of a release brings a tokenizer that turns digits into as many tokens"
)
def test_a_tokenizer_that_counts_is_refused_and_another_one_is_shown(
    device: Device, package: Package
) -> None:
    assert device.pull().text_rules == ""
    lower = changed_tokenizer(package, {"type": "Lowercase"})
    device.service.publish(lower.digest, 2)
    assert device.pull().text_rules == "normalizer Lowercase, pre-tokenizer ByteLevel"
    assert device.pull().text_rules == ""
    rule: dict[str, object] = {"type": "Replace", "pattern": {"String": "7"}, "content": "x" * 7}
    device.service.publish(changed_tokenizer(package, rule).digest, 3)
    assert device.refusal() == "tokenizer"
    installed = installed_release(device.home)
    assert installed is not None and installed.manifest_digest == lower.digest
