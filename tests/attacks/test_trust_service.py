"""The real service and the real agent, and between them a proxy that changes requests and answers.

Two tenants share one service. The device enrols through the proxy. The proxy can send requests with any token
that it holds. After each attack the installed package is unchanged, and an honest answer is accepted.
"""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from permille.package.reader import Package
from permille.store import tables
from permille.store.database import Database
from permille_agent.cli.main import main as agent
from permille_service.cli.main import main as permille
from tests.artifacts import add_package
from tests.packages import tiny_package
from tests.running_service import Running, running_service

REFUSED = 4
"""Exit code of the agent if it refuses a package."""


@dataclass(slots=True)
class Proxy:
    """A proxy. `rule` maps a path to another request (path and token), to an answer, or to None."""

    upstream: str
    rule: Callable[[str], tuple[str, str | None] | bytes | None] = lambda _path: None
    seen: dict[str, bytes] = field(default_factory=dict)
    url: str = ""


@dataclass(slots=True)
class Site:
    """Two tenants of one service, and their administrators' tokens."""

    up: Running
    tokens: dict[str, str]
    tenants: dict[str, str]
    proxy: Proxy

    def ask(self, method: str, path: str, tenant: str = "a", **options: Any) -> httpx.Response:
        """Send one request as a tenant's administrator."""
        headers = {"Authorization": f"Bearer {self.tokens[tenant]}"}
        return httpx.request(
            method, self.up.url + path, headers=headers, timeout=60.0, trust_env=False, **options
        )

    def publish(self, name: str, alias: str, *, seed: int = 0, tenant: str = "a") -> Package:
        """Publish a package. Its rows and blobs are those that a job would leave."""
        package = tiny_package(self.up.data_dir / "blobs", seed=seed)
        with Database(f"sqlite:///{self.up.data_dir / 'permille.db'}").write() as session:
            known = select(tables.Artifact.id).where(
                tables.Artifact.tenant_id == self.tenants[tenant], tables.Artifact.digest == package.digest
            )
            if session.scalar(known) is None:
                add_package(session, tenant_id=self.tenants[tenant], manifest=package.manifest)
        body = {"name": name, "package_digest": package.digest, "alias": alias}
        answer = self.ask("POST", "/v1/releases", tenant, json=body)
        assert answer.status_code == 201, answer.text
        return package


@dataclass(frozen=True, slots=True)
class Device:
    """`permille-agent` in a home folder. It knows only the address of the proxy."""

    home: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> tuple[int, Any]:
        self.capsys.readouterr()
        code = agent(["--home", str(self.home), *arguments, "--json"])
        printed = self.capsys.readouterr()
        return code, json.loads(printed.out or printed.err)

    @property
    def installed(self) -> str:
        """Return the digest of the installed package."""
        held = json.loads((self.home / "releases.json").read_text())
        return str(held["installed"]["manifest_digest"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_service(tmp_path_factory.mktemp("service"), "--no-worker") as up:
        made = Site(up, {"a": up.token}, {}, Proxy(up.url))
        b = made.ask("POST", "/v1/tenants", json={"name": "b"}).json()["id"]
        asked = {"name": "b", "role": "admin", "tenant_id": b}
        made.tokens["b"] = made.ask("POST", "/v1/tokens", json=asked).json()["secret"]
        with Database(f"sqlite:///{up.data_dir / 'permille.db'}").read() as session:
            others = set(session.scalars(select(tables.Tenant.id))) - {b}
        made.tenants.update(a=others.pop(), b=b)
        with serving(made.proxy):
            yield made


@pytest.fixture
def device(
    request: pytest.FixtureRequest, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Device:
    """Enrol a device of tenant A that follows `stable` of a new release, and install version 1."""
    name = release_of(request)
    site.proxy.rule = lambda _path: None
    site.publish(name, "stable")
    made = Device(tmp_path / "home", capsys)
    invited = site.ask("POST", "/v1/invitations", json={"release": name, "alias": "stable"}).json()
    assert made("enroll", site.proxy.url, invited["invitation"])[0] == 0
    assert made("pull")[0] == 0
    return made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return release_of(request)


def release_of(request: pytest.FixtureRequest) -> str:
    """Return the name of a release for this test only."""
    return str(request.node.name).removeprefix("test_")[:40].replace("_", "-")


@pytest.mark.attack(2, "a proxy gives a device of tenant A the release of tenant B")
def test_another_tenants_release_is_not_installed(site: Site, device: Device, name: str) -> None:
    before = device.installed
    foreign = site.publish(name, "stable", seed=1, tenant="b")
    site.publish(name, "stable", seed=2, tenant="b")
    whole = ("/v1/releases/", "/v1/trust/", "/v1/packages/")
    for prefixes in (whole, whole[:1], whole[1:]):

        def foreign_answers(path: str, given: tuple[str, ...] = prefixes) -> tuple[str, str] | None:
            return (path, site.tokens["b"]) if path.startswith(given) else None

        site.proxy.rule = foreign_answers
        code, answer = device("pull")
        assert code == REFUSED, answer
        assert device.installed == before != foreign.digest
    site.proxy.rule = lambda _path: None
    assert device("pull")[0] == 0


@pytest.mark.attack(2, "a proxy gives the canary to a device that follows stable")
def test_a_canary_is_not_installed_as_stable(site: Site, device: Device, name: str) -> None:
    before = device.installed
    canary = site.publish(name, "canary", seed=1)
    alias = f"/v1/releases/{name}/aliases/"
    site.proxy.rule = lambda path: (
        (path.replace(f"{alias}stable", f"{alias}canary"), site.tokens["a"])
        if path.startswith(alias)
        else None
    )
    assert device("pull")[0] == REFUSED
    assert device.installed == before
    assert site.ask("PUT", f"{alias}stable", json={"version": 2}).status_code == 200
    assert device("pull")[0] == 0
    assert device.installed == canary.digest


@pytest.mark.attack(2, "a proxy repeats the answer that named a version which is withdrawn now")
def test_a_withdrawn_version_is_not_installed(site: Site, device: Device, name: str) -> None:
    before = device.installed
    site.publish(name, "stable", seed=1)
    asked = f"/v1/releases/{name}/aliases/stable"
    kept = site.ask("GET", asked).content
    site.publish(name, "stable", seed=2)
    site.ask("POST", f"/v1/releases/{name}/versions/2/yank", json={"reason": "harmful"})
    site.ask("PUT", asked, json={"version": 1})
    site.proxy.rule = lambda path: (
        kept if path == asked else (path, site.tokens["a"]) if path.startswith("/v1/packages/") else None
    )
    assert device("pull")[0] == REFUSED
    assert device.installed == before


@pytest.mark.attack(2, "a proxy goes back to the version before, by answers of yesterday")
def test_the_version_before_does_not_come_back(site: Site, device: Device, name: str) -> None:
    asked = f"/v1/releases/{name}/aliases/stable"
    kept = site.ask("GET", asked).content
    newer = site.publish(name, "stable", seed=1)
    assert device("pull")[0] == 0
    assert device.installed == newer.digest
    site.proxy.rule = lambda path: kept if path == asked else None
    assert device("pull")[0] == REFUSED
    assert device.installed == newer.digest


@pytest.mark.attack(2, "a proxy mixes old and new metadata")
def test_mixed_metadata_is_refused(site: Site, device: Device, name: str) -> None:
    before = device.installed
    old = dict(site.proxy.seen)
    site.publish(name, "stable", seed=1)
    kinds = ("timestamp", "snapshot", "releases")
    for kept in kinds:
        files = {path.rpartition("/")[2]: data for path, data in old.items() if path.endswith(f"{kept}.json")}
        newest = files[max(files, key=lambda file: int(file.partition(".")[0]) if file[0].isdigit() else 0)]

        def mixed(path: str, kept: str = kept, newest: bytes = newest) -> bytes | None:
            return (
                newest if path.startswith("/v1/trust/metadata/") and path.endswith(f"{kept}.json") else None
            )

        site.proxy.rule = mixed
        code, answer = device("pull")
        assert code == REFUSED, (kept, answer)
        assert device.installed == before
    site.proxy.rule = lambda _path: None
    assert device("pull")[0] == 0
    assert device.installed != before


@pytest.mark.attack(2, "an operator publishes version 2^53 - 1, so that the name is dead")
def test_no_version_uses_a_name_up(site: Site, device: Device, name: str) -> None:
    package = site.publish(name, "stable", seed=1)
    body = {"name": name, "package_digest": package.digest, "version": 2**53 - 1, "alias": "stable"}
    assert site.ask("POST", "/v1/releases", json=body).status_code == 422
    newest = site.publish(name, "stable", seed=2)
    assert device("pull")[0] == 0
    assert device.installed == newest.digest


@pytest.mark.attack(2, "the thief of a key signs on after it was replaced")
def test_all_keys_rotate_and_no_device_enrols_again(site: Site, device: Device, name: str) -> None:
    stolen = {path: path.read_bytes() for path in (site.up.data_dir / "keys" / "trust").rglob("*.key")}
    old = {path.stem for path in stolen if path.parent.name == site.tenants["a"]}
    roles = ["root", "targets", "releases", "rollouts", "snapshot", "timestamp"]
    changed = site.up.answer("trust", "rotate", *roles)
    new = {key for role in changed["roles"] for key in role["key_ids"]}
    assert not old & new
    newer = site.publish(name, "stable", seed=1)
    assert device("pull")[0] == 0
    assert device.installed == newer.digest


@pytest.mark.attack(2, "the service is taken over, keys and all")
def test_offline_keys_sign_elsewhere_and_a_stolen_service_cannot_move_them(
    site: Site, device: Device, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def elsewhere(*arguments: str) -> Any:
        capsys.readouterr()
        assert permille(["trust", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    keys = {role: tmp_path / f"{role}.pem" for role in ("root", "second", "targets", "team")}
    public = {role: elsewhere("key", str(path))["public_key"] for role, path in keys.items()}
    drafts = site.up.answer(
        *("trust", "offline", "--root-key", public["root"], "--root-key", public["second"]),
        *("--threshold", "2", "--targets-key", public["targets"], "--into", str(tmp_path)),
    )["drafts"]
    by_role = {Path(file).name.split(".")[1]: file for file in drafts}
    assert list(by_role) == ["targets", "root"]
    elsewhere("sign", by_role["targets"], "--key", str(keys["targets"]))
    elsewhere("sign", by_role["root"], "--key", str(keys["root"]))
    early = site.up.permille("trust", "send", *drafts)
    assert early.returncode == 3, "one of two root keys is not enough"
    elsewhere("sign", by_role["root"], "--key", str(keys["second"]))
    shown = site.up.answer("trust", "send", by_role["root"])
    here = {role["role"]: role["signed_here"] for role in shown["roles"]}
    assert [role for role, signed in here.items() if not signed] == ["root", "targets"]
    left = {path.stem for path in (site.up.data_dir / "keys" / "trust" / site.tenants["a"]).iterdir()}
    assert left == {key for role in shown["roles"] if role["signed_here"] for key in role["key_ids"]}
    newer = site.publish(name, "stable", seed=1)
    assert device("pull")[0] == 0
    assert device.installed == newer.digest
    made = site.up.answer("trust", "rotate", "releases", "--into", str(tmp_path))
    assert [Path(file).name.split(".")[1] for file in made["drafts"]] == ["targets"], (
        "not without the offline key"
    )
    assert site.up.permille("trust", "send", *made["drafts"]).returncode == 3
    elsewhere("sign", made["drafts"][0], "--key", str(keys["targets"]))
    assert site.up.permille("trust", "send", *made["drafts"]).returncode == 0
    newest = site.publish(name, "stable", seed=2)
    assert device("pull")[0] == 0
    assert device.installed == newest.digest


@pytest.mark.attack(2, "two publishers at one moment: one overwrites what the other signed")
def test_publishers_at_one_moment_all_count(site: Site, device: Device, name: str) -> None:
    package = site.publish(name, "stable", seed=1)
    body = {"name": name, "package_digest": package.digest}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: site.ask("POST", "/v1/releases", json=body), range(6)))
    assert sorted(answer.json()["version"] for answer in answers) == [3, 4, 5, 6, 7, 8]
    roles = {role["role"]: role["version"] for role in site.ask("GET", "/v1/trust").json()["roles"]}
    signed = site.ask("GET", f"/v1/trust/metadata/{roles['releases']}.releases.json").json()["signed"]
    listed = {path for path in signed["targets"] if path.startswith(f"releases/{name}/")}
    assert listed == {f"releases/{name}/{version}.json" for version in range(1, 9)}
    site.ask("PUT", f"/v1/releases/{name}/aliases/stable", json={"version": 8})
    assert device("pull")[0] == 0
    assert device.installed == package.digest


@contextmanager
def serving(proxy: Proxy) -> Iterator[None]:
    """Let the proxy answer on loopback."""
    handler = type("BoundHandler", (_Handler,), {"proxy": proxy})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        ruled = self.proxy.rule(self.path)
        if isinstance(ruled, bytes):
            self._answer(200, ruled, {"content-type": "application/json"})
            return
        path, token = ruled or (self.path, None)
        passed = ("authorization", "content-type", "range", "if-range")
        headers = {name: value for name, value in self.headers.items() if name.lower() in passed}
        if token is not None:
            headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.request(
            self.command,
            self.proxy.upstream + path,
            headers=headers,
            content=body,
            timeout=60.0,
            trust_env=False,
        )
        if self.path.startswith("/v1/trust/") and answer.status_code == 200:
            self.proxy.seen[self.path] = answer.content
        kept = {name: value for name, value in answer.headers.items() if name in ("content-type", "etag")}
        self._answer(answer.status_code, answer.content, kept)

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data if status != 204 else b"")
