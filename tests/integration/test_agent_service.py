"""The device against the real service, over TLS with a self-signed certificate: all calls of the contract."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from permille.choices import Method
from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille.package.reader import Package, verify_package
from permille.store import tables
from permille.store.database import Database
from permille.trust.roles import Training
from permille_agent.cli.main import main
from permille_agent.link.download import Download
from permille_agent.link.report import enqueue
from permille_agent.state.home import open_home
from permille_agent.state.models import training_of_release
from tests.artifacts import add_package as store_package
from tests.packages import tiny_package
from tests.running_service import Running, running_service
from tests.unit.edge_agent.samples import OTHER_RUN_ID, RUN_ID, metrics

RELEASE = "tiny"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a self-signed certificate for this machine, with its key beside it."""
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ed25519 -nodes -days 1 -subj /CN=permille"
    command += " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Running]:
    options = ("--tls-certificate", str(certificate), "--tls-key", str(certificate.with_name("key.pem")))
    with running_service(tmp_path_factory.mktemp("service"), "--no-worker", *options) as running:
        yield running


Operator = Callable[..., Any]


@pytest.fixture(scope="module")
def operator(up: Running, certificate: Path) -> Operator:
    return lambda *arguments: up.answer("--ca-file", str(certificate), *arguments)


@pytest.fixture(scope="module")
def package(up: Running) -> Package:
    """Put a package into the service's store, as a job would."""
    return add_package(up, seed=0)


def add_package(up: Running, *, seed: int) -> Package:
    package = tiny_package(up.data_dir / "blobs", seed=seed)
    with Database(f"sqlite:///{up.data_dir / 'permille.db'}").write() as session:
        tenant_id = session.scalars(select(tables.Tenant.id)).one()
        store_package(session, tenant_id=tenant_id, manifest=package.manifest)
    return package


@dataclass(frozen=True)
class Device:
    """`permille-agent` in a home folder."""

    home: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> tuple[int, Any]:
        """Return the exit code and the JSON of a command. If it fails, the JSON is that of the error."""
        self.capsys.readouterr()
        code = main(["--home", str(self.home), *arguments, "--json"])
        printed = self.capsys.readouterr()
        return code, json.loads(printed.out or printed.err)


@pytest.fixture
def device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Device:
    return Device(tmp_path / "home", capsys)


@pytest.fixture
def enrolled(device: Device, up: Running, certificate: Path, operator: Operator, package: Package) -> Device:
    """Enrol a device that follows the release."""
    if RELEASE not in {release["name"] for release in operator("releases", "list")}:
        operator("releases", "publish", RELEASE, "--package", package.digest, "--alias", "stable")
    code, answer = device("enroll", up.url, invite(operator), "--ca-file", str(certificate))
    assert code == 0, answer
    return device


def invite(operator: Operator, release: str = RELEASE) -> str:
    return str(operator("invitations", "create", "--release", release)["invitation"])


def test_the_certificate_is_checked(device: Device, up: Running) -> None:
    code, answer = device("enroll", up.url, "A" * 22 + "." + "0" * 32)
    assert code == 6
    assert "certificate" in answer["error"]["message"]
    assert "--ca-file" in answer["error"]["message"]


def test_a_package_is_pulled_and_verified(enrolled: Device, package: Package) -> None:
    code, answer = enrolled("pull")
    assert (code, answer["package"], answer["version"]) == (0, package.digest, 1)
    blobs = BlobFolder(open_home(enrolled.home).blobs)
    assert verify_package(blobs, package.digest).k == package.k
    assert enrolled("pull")[1]["download_bytes"] == 0


@pytest.mark.attack(7, "a disk flips bits, and the service mends the blocks by ranges")
def test_damage_is_mended_by_ranges_of_the_service(enrolled: Device, package: Package) -> None:
    assert enrolled("pull")[0] == 0
    path = BlobFolder(open_home(enrolled.home).blobs).path(package.manifest.layer(Role.DENSE).digest)
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    code, answer = enrolled("verify")
    assert (code, len(answer["damaged"]), len(answer["left"])) == (4, 1, 1)
    code, answer = enrolled("verify", "--repair")
    assert (code, answer["left"], answer["fetched_bytes"]) == (0, [], len(whole))
    assert path.read_bytes() == whole


def test_a_download_is_continued_by_range(
    enrolled: Device, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_lose_bytes(download: Download) -> None:
        assert download._stored_bytes() == 0, "the service did not continue the range"

    home = open_home(enrolled.home)
    layer = max(package.manifest.layers, key=lambda layer: layer.size_bytes)
    data = package.blobs.path(layer.digest).read_bytes()
    part = home.partial / f"{layer.digest.removeprefix('sha256:')}.part"
    monkeypatch.setattr(Download, "_restart", refuse_to_lose_bytes)
    part.write_bytes(data[: len(data) // 2])
    part.with_suffix(".etag").write_text(f'"{layer.digest}"')
    code, answer = enrolled("pull")
    assert code == 0, answer
    assert verify_package(BlobFolder(home.blobs), package.digest).k == package.k


def test_an_invitation_is_good_once(
    enrolled: Device, up: Running, certificate: Path, operator: Operator, tmp_path: Path
) -> None:
    invitation = invite(operator)
    others = [Device(tmp_path / name, enrolled.capsys) for name in ("first", "second")]
    codes = [other("enroll", up.url, invitation, "--ca-file", str(certificate))[0] for other in others]
    assert codes == [0, 3]


def test_the_same_device_enrols_again(
    enrolled: Device, up: Running, certificate: Path, operator: Operator
) -> None:
    before = enrolled("status")[1]["enrolment"]
    same = ("--ca-file", str(certificate), "--name", before["name"])
    assert enrolled("enroll", up.url, invite(operator), *same)[0] == 0
    assert enrolled("status")[1]["enrolment"] == before


def test_reports_logs_and_their_deletion(
    enrolled: Device, package: Package, up: Running, operator: Operator
) -> None:
    home = open_home(enrolled.home)
    real = {"package_digest": package.digest, "release": RELEASE, "k": package.k}
    enqueue(home, RUN_ID, metrics(**real), shared_log=None)
    enqueue(home, OTHER_RUN_ID, metrics(**real), shared_log=b"not a log, which only the replay finds out")
    assert enrolled("report") == (0, {"delivered": 2, "refused": 0})
    assert enrolled("report") == (0, {"delivered": 0, "refused": 0})
    runs = {run["run_id"]: run for run in operator("runs", "list")}
    assert runs[RUN_ID]["log"] is None
    assert runs[RUN_ID]["metrics"]["state_digest"] is None
    assert runs[OTHER_RUN_ID]["log"]["state"] == "pending"
    operator("jobs", "cancel", runs[OTHER_RUN_ID]["log"]["job_id"])
    undecided = [run["log"] for run in operator("runs", "list") if run["log"] is not None]
    assert [operator("jobs", "retry", log["job_id"])["state"] for log in undecided] == ["queued"]
    assert operator("runs", "show", OTHER_RUN_ID)["log"]["state"] == "pending"
    assert enrolled("share-log", "delete") == (0, {"deleted": 1})
    assert {run["run_id"]: run["log"] for run in operator("runs", "list")}[OTHER_RUN_ID] is None


def test_a_revoked_device_is_refused_at_once_and_may_leave(enrolled: Device, operator: Operator) -> None:
    device_id = enrolled("status")[1]["enrolment"]["device_id"]
    operator("devices", "revoke", device_id)
    assert enrolled("pull")[0] == 6
    assert enrolled("unenroll")[0] == 0
    assert enrolled("status")[1]["enrolment"] is None


def test_unenroll_is_known_to_the_service(enrolled: Device, operator: Operator) -> None:
    device_id = enrolled("status")[1]["enrolment"]["device_id"]
    assert enrolled("unenroll")[0] == 0
    states = {device["id"]: device["state"] for device in operator("devices", "list")}
    assert states[device_id] == "unenrolled"


def test_a_new_version_replaces_and_a_yanked_one_is_refused(
    device: Device, up: Running, certificate: Path, operator: Operator, package: Package
) -> None:
    publish = ("releases", "publish", "renewed", "--alias", "stable", "--package")
    operator(*publish, package.digest)
    assert device("enroll", up.url, invite(operator, "renewed"), "--ca-file", str(certificate))[0] == 0
    assert device("pull")[0] == 0
    second = add_package(up, seed=1)
    asked = ("--method", "zeroth-order", "--steps", "50", "--first-layer", "1")
    release = operator(*publish, second.digest, *asked)
    code, answer = device("pull")
    assert (code, answer["package"], answer["changed"]) == (0, second.digest, True)
    training = training_of_release(open_home(device.home))
    assert training == Training(method=Method.ZEROTH_ORDER, steps=50, first_layer=1)
    operator("releases", "yank", "renewed", str(release["version"]))
    code, answer = device("pull")
    assert code in (4, 6), answer
    assert device("status")[1]["release"]["package"] == second.digest
