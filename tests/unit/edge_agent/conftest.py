"""Fixtures of the agent's tests: a home folder, a package, a service that offers it, an enrolled device."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.package.reader import Package
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import Connection
from permille_agent.link.enrolment import Enrolment, enroll, open_api
from permille_agent.state.home import Home, open_home
from tests.device_service import DeviceService, serving
from tests.packages import tiny_package


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Return a tiny package in the service's blob folder."""
    return tiny_package(tmp_path_factory.mktemp("published"))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home")


@pytest.fixture
def service(package: Package) -> Iterator[DeviceService]:
    """Yield a service that offers `package` as version 1."""
    with serving(package.blobs.root) as running:
        running.publish(package.digest, 1)
        yield running


def fast_connection(server: str, ca_file: Path | None) -> Connection:
    """Return a connection that does not wait between attempts."""
    return Connection(server, ca_file=ca_file, sleep=lambda _seconds: None, rng=random.Random(0))


@pytest.fixture
def enrolment(home: Home, service: DeviceService) -> Enrolment:
    """Enrol the device with `service`."""
    return enroll(home, service.url, service.invitation, connection=fast_connection)


@pytest.fixture
def api(home: Home, enrolment: Enrolment) -> Iterator[DeviceApi]:
    """Yield the service's interface for the enrolled device."""
    with open_api(home, connection=fast_connection) as opened:
        yield opened
