"""Trust metadata over the API: the client of python-tuf follows the operators' changes as a device does."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tuf.api.exceptions import DownloadHTTPError
from tuf.api.metadata import Metadata, TargetFile
from tuf.ngclient import FetcherInterface, Updater

from permille.schemas.access import Role
from permille.store import trust
from permille.trust.roles import aliases_of, target_path
from tests.api_service import Api, running_api

ROLES = ("root", "targets", "releases", "rollouts", "snapshot", "timestamp")


class ApiFetcher(FetcherInterface):
    """A fetcher that asks the API under test with one caller's token."""

    def __init__(self, api: Api, token: str) -> None:
        self._api, self._token = api, token

    def _fetch(self, url: str) -> Iterator[bytes]:
        answer = self._api.get(url.removeprefix("http://api.invalid"), self._token)
        if answer.status_code != 200:
            raise DownloadHTTPError(answer.text, answer.status_code)
        yield answer.content


class Client:
    """The view that one device has of its tenant's repository."""

    def __init__(self, api: Api, token: str, folder: Path) -> None:
        self.api, self.token, self.folder = api, token, folder
        with api.service.database.read() as session:
            self.root = trust.newest_root(session, tenant_id=api.tenant_id)

    def updater(self) -> Updater:
        base, folder = "http://api.invalid/v1/trust", str(self.folder)
        made = Updater(
            folder,
            f"{base}/metadata/",
            folder,
            f"{base}/targets/",
            fetcher=ApiFetcher(self.api, self.token),
            bootstrap=self.root,
        )
        made.refresh()
        return made

    def look(self, version: int, name: str = "tiny") -> TargetFile | None:
        return self.updater().get_targetinfo(target_path(name, version))


@pytest.fixture
def client(api: Api, tmp_path: Path) -> Client:
    api.publish(api.package())
    folder = tmp_path / "tuf"
    folder.mkdir()
    return Client(api, api.device().token(), folder)


def test_a_device_finds_and_fetches_its_manifest(client: Client, api: Api) -> None:
    package = api.package()
    target = client.look(1)
    assert target is not None
    assert aliases_of(target) == {"stable"}
    assert f"sha256:{target.hashes['sha256']}" == package.digest
    path = client.updater().download_target(target, str(client.folder / "manifest.json"))
    assert Path(path).read_bytes() == api.service.blobs.read(package.digest, limit=1 << 20)


def test_a_withdrawn_version_is_neither_listed_nor_served(client: Client, api: Api) -> None:
    target = client.look(1)
    assert target is not None
    assert api.post("/v1/releases/tiny/versions/1/yank", {"reason": "wrong corpus"}).status_code == 200
    assert client.look(1) is None
    prefixed = f"/v1/trust/targets/{target.get_prefixed_paths()[0]}"
    assert api.get(prefixed, client.token).status_code == 404


def test_a_device_reads_no_target_of_another_release(client: Client, api: Api) -> None:
    other = api.package(seed=1)
    api.publish(other, name="other")
    target = client.look(1, "other")
    assert target is not None
    path = f"/v1/trust/targets/{target.get_prefixed_paths()[0]}"
    assert api.get(path, client.token).status_code == 404
    assert api.get(path).status_code == 200
    assert api.get(path.replace(".1.json", ".9999999999999999.json")).status_code == 404
    wrong = path.replace(target.hashes["sha256"], "0" * 64)
    assert api.get(wrong).status_code == 404


def test_an_alias_moves_the_signed_list_too(client: Client, api: Api) -> None:
    api.publish(api.package(seed=1), alias="canary")
    api.put("/v1/releases/tiny/aliases/stable", {"version": 2})
    listed = [client.look(version) for version in (1, 2)]
    assert [sorted(aliases_of(target)) for target in listed if target] == [[], ["canary", "stable"]]
    api.delete("/v1/releases/tiny/aliases/canary")
    target = client.look(2)
    assert target is not None
    assert aliases_of(target) == {"stable"}


def test_a_timestamp_past_half_its_life_is_renewed_at_reading(tmp_path: Path) -> None:
    moments = [datetime(2030, 1, 1, tzinfo=UTC)]
    with running_api(tmp_path, clock=lambda: moments[0]) as api:
        before = api.get("/v1/trust").json()

        def stamp() -> int:
            answer = api.get("/v1/trust/metadata/timestamp.json")
            assert answer.headers["cache-control"] == "no-cache"
            return int(Metadata.from_bytes(answer.content).signed.version)

        assert [stamp(), stamp()] == [1, 1]
        moments[0] += timedelta(hours=13)
        assert [stamp(), stamp()] == [2, 2]
        moments[0] += timedelta(days=400)
        assert stamp() == 3, "also after everything has expired"
        after = api.get("/v1/trust").json()
    assert [role["version"] for role in before["roles"]] == [1] * 6
    assert [role["version"] for role in after["roles"]] == [2, 2, 2, 3, 2, 2]
    assert before["root_digest"] != after["root_digest"]


def test_rotation_is_for_administrators_and_makes_new_keys(client: Client, api: Api) -> None:
    body = {"roles": [{"role": role} for role in ROLES]}
    assert api.post("/v1/trust/rotations", body, api.operator(Role.OPERATOR)).status_code == 403
    before = {key for role in api.get("/v1/trust").json()["roles"] for key in role["key_ids"]}
    answer = api.post("/v1/trust/rotations", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["drafts"] == []
    after = {key for role in answer.json()["trust"]["roles"] for key in role["key_ids"]}
    assert not before & after
    folder = api.service.settings.keys_dir / "trust" / api.tenant_id
    assert {path.stem for path in folder.iterdir()} == after, "old private keys are gone"
    assert client.look(1) is not None, "the device did not enrol again"


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("2.targets.json", b"{}"),
        ("2.targets.json", b"no JSON"),
        ("2.targets.json", b"[" * 100_000),
        ("3.targets.json", b"{}"),
        ("timestamp.json", b"{}"),
        ("2.snapshot.json", b"{}"),
        ("2.nothing.json", b"{}"),
    ],
)
def test_metadata_that_does_not_follow_is_refused_and_noted_nowhere(api: Api, file: str, data: bytes) -> None:
    api.get("/v1/trust")
    before = api.get("/v1/audit?limit=200").json()
    path = f"/v1/trust/metadata/{file}"
    answer = api.client.put(path, content=data, headers=api.auth() | {"Content-Type": "application/json"})
    assert answer.status_code == 409, answer.text
    assert api.get("/v1/audit?limit=200").json() == before


@pytest.mark.attack(2, "an administrator of tenant B sends metadata that tenant A's keys signed")
def test_metadata_of_another_tenant_is_not_taken(client: Client, api: Api) -> None:
    stranger = api.operator(Role.ADMIN, tenant="stranger")
    api.get("/v1/trust", stranger)
    for file in ("2.targets.json", "2.releases.json"):
        role = file.split(".")[1]
        assert api.post("/v1/trust/renewals", {"roles": [role]}).json()["drafts"] == []
        newest = next(one for one in api.get("/v1/trust").json()["roles"] if one["role"] == role)
        own = api.get(f"/v1/trust/metadata/{newest['version']}.{role}.json").content
        headers = api.auth(stranger) | {"Content-Type": "application/json"}
        answer = api.client.put(f"/v1/trust/metadata/{file}", content=own, headers=headers)
        assert answer.status_code == 409, answer.text
    assert api.get("/v1/trust/metadata/2.targets.json", stranger).status_code == 404


@pytest.mark.parametrize(
    ("roles", "status"),
    [
        ([{"role": "nothing"}], 409),
        ([{"role": "releases"}, {"role": "releases"}], 409),
        ([{"role": "releases", "threshold": 2}], 409),
        ([{"role": "timestamp", "public_keys": ["11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"]}], 409),
        ([], 422),
    ],
)
def test_a_rotation_that_cannot_be_is_refused(api: Api, roles: list[object], status: int) -> None:
    assert api.post("/v1/trust/rotations", {"roles": roles}).status_code == status
    assert api.put("/v1/releases/none/aliases/stable", {"version": 1}).status_code == 404
    assert list(api.service.settings.keys_dir.rglob("trust/*/*.key")) == []
