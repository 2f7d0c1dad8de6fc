"""The service under test: the app in this process behind a client, and functions that add data to it.

No worker runs. Tests put the results of jobs into the store directly.
"""

import base64
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Engine, event
from starlette.testclient import TestClient

from permille.package.reader import Package
from permille.schemas.access import Role
from permille.schemas.devices import enrolment_message, token_message
from permille.store import access
from permille.store.database import Clock, Database
from permille.store.migrations.schema import migrate
from permille_service.app import create_app
from permille_service.context import Service
from permille_service.settings import Settings
from tests.artifacts import add_package
from tests.packages import tiny_package
from tests.unit.edge_agent.samples import metrics

URL = "http://127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The app under test, and the token of the first administrator."""

    client: TestClient
    service: Service
    token: str

    def auth(self, token: str | None = None) -> dict[str, str]:
        """Return the headers of a caller. The default is the administrator."""
        return {"Authorization": f"Bearer {self.token if token is None else token}"}

    def get(self, path: str, token: str | None = None, **options: Any) -> Any:
        return self.client.get(path, headers={**self.auth(token), **options.pop("headers", {})}, **options)

    def post(self, path: str, body: Any = None, token: str | None = None, key: str | None = None) -> Any:
        headers = self.auth(token) | ({"Idempotency-Key": key} if key else {})
        return self.client.post(path, json=body, headers=headers)

    def put(self, path: str, body: Any, token: str | None = None) -> Any:
        return self.client.put(path, json=body, headers=self.auth(token))

    def delete(self, path: str, token: str | None = None) -> Any:
        return self.client.delete(path, headers=self.auth(token))

    @property
    def tenant_id(self) -> str:
        with self.service.database.read() as session:
            tenant = access.first_tenant(session)
        if tenant is None:
            raise LookupError("expected a first tenant, got none")
        return tenant.id

    def statements(self, path: str, token: str | None = None) -> int:
        """Count the SQL statements of a GET request, without those that begin a transaction."""
        told: list[str] = []

        def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            told.append(statement)

        event.listen(Engine, "before_cursor_execute", note)
        try:
            assert self.get(path, token).status_code == 200
        finally:
            event.remove(Engine, "before_cursor_execute", note)
        return sum(not statement.startswith("BEGIN") for statement in told)

    def operator(self, role: Role, *, tenant: str | None = None) -> str:
        """Return the token of a new operator in the first tenant, or in a new tenant named `tenant`."""
        with self.service.database.write() as session:
            first = access.first_tenant(session)
            owner = access.create_tenant(session, name=tenant) if tenant else first
            if owner is None:
                raise LookupError("expected a first tenant, got none")
            return access.create_token(session, tenant_id=owner.id, name="test", role=role)[1]

    def package(self, *, seed: int = 0, tenant_id: str | None = None) -> Package:
        """Add a tiny package to the blob store and to the tenant's packages."""
        package = tiny_package(self.service.settings.blob_root, seed=seed)
        with self.service.database.write() as session:
            add_package(session, tenant_id=tenant_id or self.tenant_id, manifest=package.manifest)
        return package

    def publish(self, package: Package, name: str = "tiny", alias: str = "stable") -> dict[str, Any]:
        answer = self.post("/v1/releases", {"name": name, "package_digest": package.digest, "alias": alias})
        assert answer.status_code == 201, answer.text
        record: dict[str, Any] = answer.json()
        return record

    def device(
        self, *, release: str = "tiny", alias: str = "stable", token: str | None = None
    ) -> "TestDevice":
        invited = self.post("/v1/invitations", {"release": release, "alias": alias}, token).json()
        device = TestDevice(api=self, key=Ed25519PrivateKey.generate())
        answer = device.enrol(invited["invitation"])
        assert answer.status_code == 201, answer.text
        device.id = answer.json()["device_id"]
        return device


@dataclass(slots=True)
class TestDevice:
    """A client for the routes of devices."""

    __test__ = False

    api: Api
    key: Ed25519PrivateKey
    id: str = ""

    @property
    def public_key(self) -> str:
        return encode(self.key.public_key().public_bytes_raw())

    def enrol(self, invitation: str, *, signer: Ed25519PrivateKey | None = None) -> Any:
        message = enrolment_message(invitation, self.public_key)
        body = {
            "invitation": invitation,
            "public_key": self.public_key,
            "name": "test laptop",
            "agent_version": "0.1.0",
            "signature": encode((signer or self.key).sign(message)),
        }
        return self.api.client.post("/v1/enrolments", json=body)

    def nonce(self) -> str:
        answer = self.api.client.post("/v1/device-tokens/nonces", json={"device_id": self.id})
        assert answer.status_code == 201, answer.text
        nonce: str = answer.json()["nonce"]
        return nonce

    def ask_token(self, nonce: str, *, key: Ed25519PrivateKey | None = None) -> Any:
        signature = (key or self.key).sign(token_message(self.id, nonce))
        body = {"device_id": self.id, "nonce": nonce, "signature": encode(signature)}
        return self.api.client.post("/v1/device-tokens", json=body)

    def token(self) -> str:
        answer = self.ask_token(self.nonce())
        assert answer.status_code == 201, answer.text
        token: str = answer.json()["access_token"]
        return token


@contextmanager
def running_api(folder: Path, *, clock: Clock | None = None, **settings: Any) -> Iterator[Api]:
    """Run the app with its data below `folder`. If `clock` is given, it replaces the database's clock."""
    rows = folder / "data" / "permille.db"
    if "database_url" not in settings and not rows.exists():
        rows.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rows.write_bytes(_migrated())
    app = create_app(Settings(**{"data_dir": folder / "data", **settings}))
    service: Service = app.state.service
    if clock is not None:
        service.database.close()
        database = Database(service.settings.database_url.get_secret_value(), clock=clock)
        service = app.state.service = replace(service, database=database)
    token = service.settings.token_path.read_text().strip()
    with TestClient(app, base_url=URL, raise_server_exceptions=False) as client:
        yield Api(client=client, service=service, token=token)


@cache
def _migrated() -> bytes:
    """Return the bytes of an empty migrated database. They are cached and copied into each service."""
    with TemporaryDirectory() as folder:
        migrate(f"sqlite:///{folder}/permille.db")
        return (Path(folder) / "permille.db").read_bytes()


def encode(data: bytes) -> str:
    """Encode as base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def run_metrics(**changes: Any) -> dict[str, Any]:
    """Return the metrics of a run as JSON, as a device reports them. `changes` may be invalid."""
    return {**metrics(state_digest=None).model_dump(mode="json"), **changes}


def new_run_id() -> str:
    return str(uuid.uuid4())
