"""Fixtures of the registry's tests: a registry behind a gate, a package, a device, and an empty home."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from permille.digests import digest_of
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.reader import Package
from permille_agent.link import install
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import Connection
from permille_agent.link.enrolment import Enrolment, enroll, open_api
from permille_agent.link.pull import Pulled, pull
from permille_agent.state.home import Home, open_home, write_record
from permille_registry.agent import source
from permille_registry.agent.source import ChosenRegistry
from permille_registry.artifact import MANIFEST_TYPE, artifact_of, blobs_of, config_of
from permille_registry.client import Registry
from tests.device_service import DeviceService, serving
from tests.packages import tiny_package
from tests.registry.site import Gate, gate, registry

NOW_S = 1_800_000_000.0


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


@dataclass(frozen=True)
class Device:
    """An enrolled device that fetches blobs from the registry, and its service."""

    home: Home
    api: DeviceApi
    enrolment: Enrolment
    service: DeviceService

    def pull(self) -> Pulled:
        return pull(self.home, self.api, self.enrolment, now_s=NOW_S)

    def asked(self, what: str) -> list[str]:
        """Return the paths at the service that contain `what`."""
        return [path for _, path, _ in self.service.requests if what in path]


def _connect(server: str, ca_file: Path | None) -> Connection:
    return Connection(server, ca_file=ca_file, sleep=lambda _seconds: None)


@pytest.fixture
def new_device(
    tmp_path: Path, packages: tuple[Package, Package], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Device]:
    """Yield a device whose service offers the first package, and that has not pulled yet."""
    # Other tests cover the trial of a package in a child process.
    monkeypatch.setattr(install, "try_package", lambda *_args, **_more: None)
    monkeypatch.setattr(source, "connect", _connect)
    with serving(packages[0].blobs.root) as service:
        service.publish(packages[0].digest, 1)
        home = open_home(tmp_path / "home")
        enrolment = enroll(home, service.url, service.invitation, connection=_connect)
        with open_api(home, connection=_connect) as api:
            yield Device(home, api, enrolment, service)


@pytest.fixture
def device(new_device: Device, site: Gate) -> Device:
    """Return this device after `permille-agent registry use`."""
    write_record(new_device.home.registry, ChosenRegistry(address=str(site.address())))
    return new_device
