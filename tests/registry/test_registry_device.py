"""A device fetches the blobs of packages from a registry, and a registry cannot harm it."""

import pytest

from permille.errors import OperatorError, PackageError, PermilleError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille_agent.link.forget import forget, unenroll
from permille_agent.link.verify import verify
from permille_agent.state.lock import hold_lock
from permille_agent.state.models import installed_release
from tests.enrolled import Device
from tests.registry.conftest import push
from tests.registry.site import Fault, Gate


def test_the_choice_of_a_registry_ends_with_the_enrolment(device: Device) -> None:
    with hold_lock(device.home, "test"):
        forget(device.home)
        assert device.home.registry.exists()
        unenroll(device.home, None)
    assert not device.home.registry.exists()


def largest(package: Package) -> str:
    """Return the digest of the largest blob."""
    return max(package.manifest.layers, key=lambda layer: layer.size_bytes).digest


def test_a_device_fetches_every_blob_from_the_registry(
    device: Device, site: Gate, packages: tuple[Package, Package]
) -> None:
    push(site, packages[0])
    pulled = device.pull()
    assert pulled.release.manifest_digest == packages[0].digest
    assert device.service.asked("/blobs/") == []
    assert len(site.lines(r"^GET .*/blobs/sha256:")) == len({x.digest for x in packages[0].manifest.layers})
    # The service's token stays at the service.
    assert not any("authorization" in headers for _, headers, _ in site.requests)


def test_a_cut_download_continues_where_it_broke(
    device: Device, site: Gate, packages: tuple[Package, Package]
) -> None:
    push(site, packages[0])
    site.faults = [Fault(largest(packages[0]), cut_after=1000, times=2)]
    before = site.sent_bytes
    device.pull()
    # The cut bytes were not sent again. Answers without a body have no bytes.
    assert site.sent_bytes - before == device.pull().package_bytes - _manifest_bytes(packages[0])
    ranges = [headers.get("range") for line, headers, _ in site.requests if largest(packages[0]) in line]
    assert ranges[-2:] == ["bytes=1000-", "bytes=2000-"]


def _manifest_bytes(package: Package) -> int:
    return package.blobs.size(package.digest)


def test_damage_is_repaired_from_the_registry(
    device: Device, site: Gate, packages: tuple[Package, Package]
) -> None:
    push(site, packages[0])
    device.pull()
    blobs = BlobFolder(device.home.blobs)
    for digest in (packages[0].digest, largest(packages[0])):
        path = blobs.path(digest)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)
    assert not verify(device.home, device.api).left
    assert device.service.asked("/manifest") == device.service.asked("/blobs/") == []
    assert not verify(device.home).damaged


@pytest.mark.attack(31, "a registry that sends other, too few, too many or endless bytes of a package")
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("blobs/sha256", times=99, flip_byte=5), "blob-digest"),
        (Fault("blobs/sha256", times=99, cut_after=3), "does not answer"),
        (Fault("blobs/sha256", times=99, status=200, body=b"short"), "blob-size"),
        (Fault("blobs/sha256", times=99, status=200, body=bytes(1 << 20)), "blob-size"),
        (Fault("blobs/sha256", times=99, endless=True), "blob-size"),
    ],
    ids=["other bytes", "cut", "too few", "too many", "endless"],
)
def test_a_registry_cannot_replace_a_package(
    device: Device, site: Gate, packages: tuple[Package, Package], fault: Fault, error: str
) -> None:
    push(site, packages[0])
    push(site, packages[1], "2")
    device.pull()
    device.service.publish(packages[1].digest, 2)
    site.faults = [fault]
    before = installed_release(device.home)
    with pytest.raises(PermilleError, match=error):
        device.pull()
    assert installed_release(device.home) == before
    assert site.endless_bytes < 64 << 20
    assert not verify(device.home).damaged
    site.faults = []
    assert device.pull().release.version == 2


@pytest.mark.attack(31, "a registry whose tag and blobs are those of an older version")
def test_a_registry_cannot_go_back_to_an_older_version(
    device: Device, site: Gate, packages: tuple[Package, Package]
) -> None:
    push(site, packages[0])
    device.pull()
    device.service.publish(packages[1].digest, 2)
    # The registry has the older version only, also under the tag of the new one.
    push(site, packages[0], "2")
    with pytest.raises(OperatorError, match=r"has no sha256:.*permille releases push"):
        device.pull()
    # It serves the blobs of the older version for those of the new one.
    old = packages[0].blobs.path(largest(packages[0])).read_bytes()
    site.faults = [Fault("blobs/sha256", times=99, status=200, body=old)]
    with pytest.raises(PackageError, match="blob-"):
        device.pull()
    release = installed_release(device.home)
    assert release is not None and release.manifest_digest == packages[0].digest


@pytest.mark.attack(31, "a registry that replaces the manifest during a repair, or sends one without end")
@pytest.mark.parametrize("fault", [Fault("", times=99, endless=True), Fault("", times=99, flip_byte=9)])
def test_a_registry_cannot_replace_a_manifest(
    device: Device, site: Gate, packages: tuple[Package, Package], fault: Fault
) -> None:
    push(site, packages[0])
    device.pull()
    path = BlobFolder(device.home.blobs).path(packages[0].digest)
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    site.faults = [fault]
    try:
        assert verify(device.home, device.api).left
    except OperatorError as exc:
        assert "more than 4194304 bytes" in str(exc)
    assert site.endless_bytes < 64 << 20
    site.faults = []
    assert not verify(device.home, device.api).left
    assert not verify(device.home).damaged
