"""An enrolled device and its service, for tests of updates."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille_agent.link import install
from permille_agent.link.api import DeviceApi
from permille_agent.link.enrolment import Connect, Enrolment, enroll, open_api
from permille_agent.link.pull import Pulled, pull
from permille_agent.state.home import Home, open_home
from permille_agent.state.models import installed_release
from tests.device_service import DeviceService, serving

NOW_S = 1_800_000_000.0


@dataclass(frozen=True)
class Device:
    """An enrolled device and its service."""

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
        """Pull and return the code of the refusal. Check that the installed release is unchanged."""
        before = installed_release(self.home)
        with pytest.raises(PackageError) as refused:
            self.pull()
        assert installed_release(self.home) == before
        return refused.value.code


@contextmanager
def enrolled(folder: Path, package: Package, connection: Connect) -> Iterator[Device]:
    """Yield a device whose service offers the package as version 1, and that has not pulled yet."""
    with pytest.MonkeyPatch.context() as patch, serving(package.blobs.root) as service:
        # Other tests cover the trial of a package in a child process.
        patch.setattr(install, "try_package", lambda *_args, **_more: None)
        service.publish(package.digest, 1)
        home = open_home(folder)
        enrolment = enroll(home, service.url, service.invitation, connection=connection)
        with open_api(home, connection=connection) as api:
            yield Device(home, api, enrolment, service)
