"""Attacks by somebody between a device and its service, or by somebody who holds a key for a while.

The service is a TUF repository behind real HTTP, and the attacker changes what it serves. After each attack,
the installed package is unchanged, and the device accepts the honest service again.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tuf.api.metadata import Targets

from permille.errors import OperatorError, PackageError, PermilleError
from permille.package.reader import Package
from permille.trust.metadata import Holders, new_signer
from permille.trust.repository import Repository
from permille.trust.roles import target_path
from permille_agent.link.client import AccessRefusedError, Connection, ServiceUnavailableError
from permille_agent.link.enrolment import enroll, load_enrolment
from permille_agent.state.home import open_home
from permille_agent.state.models import installed_release
from tests.device_service import CODE, RELEASE_NAME, Fault
from tests.enrolled import Device, enrolled
from tests.packages import tiny_package

ROOT = Path(__file__).resolve().parents[2]


def _connect(server: str, ca_file: Path | None) -> Connection:
    return Connection(server, ca_file=ca_file, sleep=lambda _seconds: None, rng=random.Random(0), attempts=2)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Package]:
    """Make two packages in the service's folder."""
    folder = tmp_path_factory.mktemp("published")
    return tiny_package(folder), tiny_package(folder, seed=1)


@pytest.fixture
def device(tmp_path: Path, packages: tuple[Package, Package]) -> Iterator[Device]:
    with enrolled(tmp_path / "home", packages[0], _connect) as device:
        device.pull()
        yield device


@pytest.mark.attack(2, "replay metadata that the device has seen the successor of")
@pytest.mark.parametrize("kept", ["timestamp.json", "snapshot.json", "releases.json"])
def test_metadata_that_was_replaced_is_not_believed_again(
    device: Device, packages: tuple[Package, Package], kept: str
) -> None:
    service, old = device.service, dict(device.service.metadata)
    service.publish(packages[1].digest, 2)
    assert device.pull().release.version == 2
    honest = dict(service.metadata)
    service.publish(packages[1].digest, 3)
    newest, service.metadata = service.metadata, dict(honest)
    if kept == "timestamp.json":
        service.metadata = old
    else:  # Serve the old bytes under the newest file's name, so that the roles are of different times.
        role = kept.removesuffix(".json")
        ages = [sorted(name for name in files if name.endswith(f".{kept}")) for files in (old, newest)]
        assert ages[0][-1] != ages[1][-1], role
        service.metadata = newest | {ages[1][-1]: old[ages[0][-1]]}
    assert device.refusal() == "trust-rollback"
    service.metadata = newest
    assert device.pull().release.version == 3


@pytest.mark.attack(2, "hold back all new metadata until it has run out")
def test_metadata_that_ran_out_stops_updates_and_leaves_what_is_installed(
    device: Device, packages: tuple[Package, Package]
) -> None:
    repository = device.service.repository
    repository.now = datetime.now(UTC) - timedelta(days=2)
    device.service.publish(packages[1].digest, 2)
    assert device.refusal() == "trust-expired"
    repository.now = datetime.now(UTC)
    repository.renew()
    device.service.keep_metadata()
    assert device.pull().release.version == 2


@pytest.mark.attack(2, "install a release of another tenant by a proxy")
def test_metadata_of_another_tenant_is_not_believed(
    device: Device, packages: tuple[Package, Package]
) -> None:
    foreign = Repository.create(now=datetime.now(UTC))
    for version in range(1, 9):  # Its version numbers are higher than all that the device has seen.
        foreign.publish(RELEASE_NAME, version, _manifest(packages[1]), aliases=["stable"])
    device.service.metadata = dict(foreign.changed)
    device.service.point(packages[1].digest, 8)
    assert device.refusal() == "trust-signature"


@pytest.mark.attack(2, "answer the alias of a stable device with a canary, a withdrawn or an unknown version")
def test_a_version_that_is_not_signed_for_the_devices_alias_is_not_installed(
    device: Device, packages: tuple[Package, Package]
) -> None:
    service, second = device.service, packages[1].digest
    service.publish(second, 2, alias="canary")
    assert device.refusal() == "release-alias"
    service.repository.withdraw(RELEASE_NAME, 2)
    service.keep_metadata()
    assert device.refusal() == "release-unlisted"
    service.point(second, 2**53 - 1)
    assert device.refusal() == "release-unlisted"
    service.publish(second, 3)
    assert device.pull().release.version == 3


@pytest.mark.attack(2, "swap the manifest of a signed version")
def test_a_manifest_with_other_bytes_is_refused(device: Device, packages: tuple[Package, Package]) -> None:
    device.service.publish(packages[1].digest, 2)
    other = _manifest(packages[0])
    for body in (other, _manifest(packages[1])[:-1], b""):
        device.service.faults = [Fault(path="/v1/trust/targets/", status=200, body=body)]
        assert device.refusal() == "trust-digest"
    assert device.pull().release.version == 2


@pytest.mark.attack(2, "sign with a stolen key after it was replaced")
def test_a_replaced_key_signs_nothing_any_more_and_no_device_enrols_again(
    device: Device, packages: tuple[Package, Package]
) -> None:
    repository, service = device.service.repository, device.service
    stolen = Repository.open(repository.newest, repository.signers, datetime.now(UTC))
    fresh = {role: new_signer() for role in ("root", "targets", "releases", "snapshot", "timestamp")}
    repository.signers |= {signer.public_key.keyid: signer for signer in fresh.values()}
    repository.rotate({role: Holders(keys=(signer.public_key,)) for role, signer in fresh.items()})
    service.publish(packages[1].digest, 2)
    assert device.pull().release.version == 2
    for version in (3, 4, 5, 6, 7, 8):
        stolen.publish(RELEASE_NAME, version, _manifest(packages[0]), aliases=["stable"])
    honest, service.metadata = service.metadata, service.metadata | stolen.changed
    service.metadata |= {name: data for name, data in honest.items() if name.endswith(".root.json")}
    service.point(packages[0].digest, 8)
    assert device.refusal() == "trust-signature"
    service.metadata = honest
    service.point(packages[1].digest, 2)
    assert device.pull().release.version == 2


@pytest.mark.attack(2, "jump a version to the largest number by a stolen online key")
def test_a_jump_of_versions_ends_with_new_keys(device: Device, packages: tuple[Package, Package]) -> None:
    repository, service = device.service.repository, device.service
    stolen = Repository.open(repository.newest, repository.signers, datetime.now(UTC))
    jumped = stolen._metadata("timestamp").signed
    jumped.version = 2**53 - 1
    stolen._keep_online("timestamp", jumped)
    honest, service.metadata = service.metadata, service.metadata | stolen.changed
    device.pull()  # The metadata are signed correctly, so the device accepts them.
    service.metadata = honest
    service.publish(packages[1].digest, 2)
    assert device.refusal() == "trust-rollback"
    online = new_signer()
    repository.signers[online.public_key.keyid] = online
    repository.rotate({role: Holders(keys=(online.public_key,)) for role in ("snapshot", "timestamp")})
    service.keep_metadata()
    assert device.pull().release.version == 2


@pytest.mark.attack(2, "answer 400, 401, 403, 404 or 500 at each file, or cut what a role delegates")
def test_refusals_at_any_file_change_nothing(device: Device, packages: tuple[Package, Package]) -> None:
    service = device.service
    service.publish(packages[1].digest, 2)
    files = ["root.json", "timestamp.json", "snapshot.json", "releases.json", "trust/targets", "/aliases/"]
    for file in files:
        for status in (400, 401, 403, 404, 500):
            if (file, status) == ("root.json", 404):
                continue  # This is the honest answer that there is no newer root.
            service.faults = [Fault(path=file, status=status, times=9)]
            with pytest.raises(PermilleError) as failed:
                device.pull()
            expected = (
                AccessRefusedError if status in (401, 403) else (ServiceUnavailableError, OperatorError)
            )
            assert isinstance(failed.value, expected), (file, status)
            assert installed_release(device.home).version == 1  # type: ignore[union-attr]
    service.faults = []
    assert device.pull().release.version == 2


@pytest.mark.attack(2, "answer a metadata file with bytes that never end")
@pytest.mark.parametrize(
    "file", ["root.json", "timestamp.json", "snapshot.json", "releases.json", "targets/"]
)
def test_an_answer_without_end_is_cut_at_its_limit(
    device: Device, packages: tuple[Package, Package], file: str
) -> None:
    device.service.publish(packages[1].digest, 2)
    device.service.faults = [Fault(path=f"/trust/.*{file}", endless=True)]
    with pytest.raises(OperatorError, match="sent more than"):
        device.pull()
    assert installed_release(device.home).version == 1  # type: ignore[union-attr]
    assert device.service.endless_bytes_sent < 64 << 20
    assert device.pull().release.version == 2


@pytest.mark.attack(2, "flip, cut or replace bytes of signed metadata")
def test_damaged_metadata_is_refused_by_a_code(device: Device, packages: tuple[Package, Package]) -> None:
    service, rng = device.service, random.Random(2)
    service.publish(packages[1].digest, 2)
    honest = dict(service.metadata)
    # In the order of their download, because the device does not ask again for accepted files.
    ending = ("timestamp.json", ".snapshot.json", ".releases.json")
    newest = [next(name for name in service.repository.files() if name.endswith(end)) for end in ending]
    changes: list[Callable[[bytes], bytes]] = [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"[" * 10_000,
        lambda data: b'{"signed": {}, "signatures": []}',
        lambda data: data.replace(b'"version":', b'"version":' + b"9" * 5000),
        *[lambda data: _flip(data, rng)] * 6,
    ]
    for name in newest:
        service.metadata = honest | {name: b"no metadata"}
        assert device.refusal() == "trust-malformed"
        for change in changes:
            service.metadata = honest | {name: change(honest[name])}
            assert device.refusal().startswith("trust-")
    service.metadata = honest
    assert device.pull().release.version == 2


@pytest.mark.attack(2, "have a version signed that names no alias")
def test_a_signed_version_without_aliases_is_for_nobody(
    device: Device, packages: tuple[Package, Package]
) -> None:
    service = device.service
    service.publish(packages[1].digest, 2)
    for custom in ({}, {"aliases": "stable"}, {"aliases": [1]}, None):

        def edit(targets: Targets, custom: object = custom) -> None:
            targets.targets[target_path(RELEASE_NAME, 2)].unrecognized_fields["custom"] = custom

        service.repository._edit("releases", edit)
        service.keep_metadata()
        assert device.refusal() == "release-malformed"


@pytest.mark.attack(2, "hand a new device a root of one's own")
def test_a_root_that_the_invitation_does_not_name_is_not_trusted(tmp_path: Path, device: Device) -> None:
    new, honest = open_home(tmp_path / "new"), device.service.invitation
    device.service.invitations.add(CODE)
    device.service.repository = Repository.create(now=datetime.now(UTC))
    device.service.metadata |= device.service.repository.changed
    answers = [device.service.repository.newest["root"].decode(), "", "{}"]
    for root in answers:
        device.service.forced_root = root
        with pytest.raises(PackageError) as refused:
            enroll(new, device.service.url, honest, connection=_connect)
        assert refused.value.code == "trust-root"
        assert load_enrolment(new) is None
    assert not list(new.trust.iterdir())


@pytest.mark.attack(2, "cut the power after metadata was accepted")
def test_metadata_is_on_the_disk_before_it_counts(
    device: Device, packages: tuple[Package, Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()

    def sync(descriptor: int, call: Callable[[int], None] = os.fsync) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        call(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    device.service.publish(packages[1].digest, 2)
    device.pull()
    for file in ("timestamp.json", "snapshot.json", "releases.json"):
        assert any(name.startswith(f".{file}.") for name in synced), file
    assert {"trust", "root_history"} <= synced


@pytest.mark.attack(2, "kill the device at each write of its metadata folder")
@pytest.mark.parametrize(("step", "kills"), [(9, 3), pytest.param(1, 30, marks=pytest.mark.slow)])
def test_a_kill_at_any_write_loses_no_floor_and_blocks_no_update(
    tmp_path: Path, step: int, kills: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks.kill_metadata", str(tmp_path), str(step)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("kills=")[1]) >= kills


def _manifest(package: Package) -> bytes:
    return package.blobs.read(package.digest, limit=1 << 20)


def _flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
