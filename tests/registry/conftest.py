"""Fixtures of the registry's tests: a registry behind a gate, a package, a device, and an empty home."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from permille.digests import digest_of
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.reader import Package
from permille_agent.link.client import Connection
from permille_agent.state.home import write_record
from permille_registry.agent import source
from permille_registry.agent.source import ChosenRegistry
from permille_registry.artifact import MANIFEST_TYPE, artifact_of, blobs_of, config_of
from permille_registry.client import Registry
from tests.enrolled import Device, enrolled
from tests.packages import tiny_package
from tests.registry.site import Gate, gate, registry


@pytest.fixture(autouse=True)
def _no_logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the logins and unfinished uploads of the user who runs the tests out of them."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Gate]:
    """Yield the gate of an empty registry."""
    with registry(tmp_path / "registry") as host, gate(host) as opened:
        yield opened


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Package]:
    """Make two packages in one folder."""
    folder = tmp_path_factory.mktemp("packages")
    return tiny_package(folder), tiny_package(folder, seed=1)


def open_registry(site: Gate, actions: str = "pull,push") -> Registry:
    """Open the registry without waits between attempts."""
    return Registry(site.address(), actions, sleep=lambda _seconds: None)


def reading(blobs: BlobFolder, digest: str) -> Callable[[int, int], bytes]:
    """Return a function that reads a range of a blob."""
    data = blobs.path(digest).read_bytes()
    return lambda begin, end: data[begin:end]


def push(site: Gate, package: Package, tag: str = "1") -> None:
    """Push a package as `permille releases push` does, but from a folder."""
    manifest = package.blobs.read(package.digest, limit=MAX_MANIFEST_BYTES)
    config = config_of("tiny-llama", 1, manifest)
    with open_registry(site) as opened:
        for blob in blobs_of(manifest):
            opened.upload(blob.digest, blob.size_bytes, reading(package.blobs, blob.digest))
        opened.upload(digest_of(config), len(config), lambda begin, end: config[begin:end])
        opened.put_manifest(tag, MANIFEST_TYPE, artifact_of(config, manifest))


def _connect(server: str, ca_file: Path | None) -> Connection:
    return Connection(server, ca_file=ca_file, sleep=lambda _seconds: None)


@pytest.fixture
def new_device(
    tmp_path: Path, packages: tuple[Package, Package], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Device]:
    """Yield a device whose service offers the first package, and that has not pulled yet."""
    monkeypatch.setattr(source, "connect", _connect)
    with enrolled(tmp_path / "home", packages[0], _connect) as device:
        yield device


@pytest.fixture
def device(new_device: Device, site: Gate) -> Device:
    """Return this device after `permille-agent registry use`."""
    write_record(new_device.home.registry, ChosenRegistry(address=str(site.address())))
    return new_device
