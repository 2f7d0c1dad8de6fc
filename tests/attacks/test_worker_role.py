"""A worker's database role: it does all of a worker's work, and cannot make itself an administrator."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

from permille.errors import OperatorError, RetryableError
from permille.store import tables
from permille.store.database import Database
from permille.store.grants import PRIVILEGES
from permille.store.migrations.schema import migrate
from permille.store.retention import rules
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.supervisor import Shutdown
from permille_workers.runtime.sweeper import Sweeper
from tests.api_service import Api, running_api
from tests.one_job import run_one
from tests.tiny_model import write_corpus, write_model
from tests.unit.store.postgres import Server, postgres_server
from tests.worker_role import ROLE, make_role

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose"
HARD_PASSWORD = "'it''s$HOME\\n\"and\":;--@/'"
FORBIDDEN = (
    "INSERT INTO operator_tokens (id, tenant_id, created_at, name, role, token_hash) "
    "SELECT 'operator_x', id, 0, 'x', 'admin', 'x' FROM tenants",
    "SELECT token_hash FROM operator_tokens",
    "UPDATE operator_tokens SET role = 'admin'",
    "DELETE FROM operator_tokens",
    "INSERT INTO tenants (id, name, created_at) VALUES ('tenant_x', 'x', 0)",
    "UPDATE tenants SET name = 'x'",
    "DELETE FROM tenants",
    "INSERT INTO invitations SELECT * FROM invitations",
    "SELECT * FROM invitations",
    "INSERT INTO device_tokens SELECT * FROM device_tokens",
    "INSERT INTO device_nonces SELECT * FROM device_nonces",
    "INSERT INTO devices SELECT * FROM devices",
    "UPDATE devices SET public_key = 'x'",
    "DELETE FROM devices",
    "DELETE FROM ended_sessions",
    "SELECT * FROM idempotent_answers",
    "INSERT INTO releases SELECT * FROM releases",
    "UPDATE releases SET yanked_at = NULL",
    "UPDATE aliases SET version = 1",
    "UPDATE trust_metadata SET data = 'x'",
    "SELECT * FROM trust_metadata",
    "UPDATE retention_rules SET token_id = 'x'",
    "UPDATE models SET tenant_id = 'x'",
    "UPDATE webhooks SET url = 'x'",
    "INSERT INTO webhooks SELECT * FROM webhooks",
    "UPDATE audit_entries SET token_id = 'x'",
    "DELETE FROM audit_entries",
    "TRUNCATE audit_entries",
    "INSERT INTO audit_entries (tenant_id, seq, created_at, token_id, action, subject, digest) "
    "SELECT id, 999, 0, 'x', 'create_token', '/', 'x' FROM tenants",
    "ALTER TABLE audit_entries DISABLE ROW LEVEL SECURITY",
    "CREATE POLICY mine ON audit_entries USING (true)",
    "GRANT ALL ON operator_tokens TO permille_worker",
    "CREATE TABLE x (y int)",
    "CREATE FUNCTION x() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "DROP TABLE jobs",
    "UPDATE alembic_version SET version_num = 'x'",
    "SET ROLE permille",
    "SET SESSION AUTHORIZATION permille",
    "COPY jobs TO PROGRAM 'cat'",
    "ALTER ROLE permille_worker SUPERUSER",
    "SELECT pg_read_file('PG_VERSION')",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An API that owns the tables, and the same store as a worker reaches it."""

    api: Api
    worker: Api
    moments: list[datetime]
    url: str


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as running:
        yield running


@pytest.fixture(scope="module")
def place(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    moments, url = [datetime(2030, 1, 1, tzinfo=UTC)], make_role(server)
    folder = tmp_path_factory.mktemp("service")
    with running_api(
        folder,
        clock=lambda: moments[0],
        database_url=server.url,
        worker_role=ROLE,
        sign_ins_per_minute=10_000,
    ) as api:
        own = Database(url, clock=lambda: moments[0])
        worker = Api(client=api.client, service=replace(api.service, database=own), token=api.token)
        write_model(api.service.settings.model_root / "tiny")
        write_corpus(api.service.settings.corpus_root / "texts.jsonl")
        yield Place(api=api, worker=worker, moments=moments, url=url)
        own.close()
        api.service.database.close()


def sweep(place: Place, seconds: float = 0.0) -> None:
    """Let time pass, and sweep as a worker does."""
    place.moments[0] += timedelta(seconds=seconds)
    service = place.worker.service
    settings = WorkerSettings.model_validate({"data_dir": service.settings.data_dir})
    sweeper = Sweeper(
        name="w", db=service.database, blobs=service.blobs, settings=settings, shutdown=Shutdown()
    )
    sweeper.sweep()
    sweeper._pull_back()
    sweeper._collect()


def finish(place: Place, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Create a job, run all queued jobs as a worker, and return the job."""
    answer = place.api.post(path, body)
    assert answer.status_code in (200, 202), answer.text
    while run_one(place.worker):
        sweep(place)
    job: dict[str, Any] = place.api.get(f"/v1/jobs/{answer.json()['id']}").json()
    assert job["state"] == "succeeded", job["error"]
    return job


def test_the_script_of_compose_makes_a_role_that_works_with_its_password_alone(tmp_path: Path) -> None:
    with postgres_server() as server:
        url = make_url(server.url).set(drivername="postgresql")
        with psycopg.connect(url.render_as_string(), autocommit=True) as owner:
            owner.execute("CREATE DATABASE permille")
            (rules_file,) = owner.execute("SHOW hba_file").fetchone() or ("",)
        own = {"PGHOST": "127.0.0.1", "PGPORT": str(url.port), "PATH": os.environ["PATH"]}
        own |= {"POSTGRES_USER": "permille", "WORKER_PASSWORD": HARD_PASSWORD}
        subprocess.run(["sh", COMPOSE / "worker-role.sh"], env=own, check=True, capture_output=True)
        again = subprocess.run(["sh", COMPOSE / "worker-role.sh"], env=own, capture_output=True, text=True)
        assert again.returncode != 0
        assert "already exists" in again.stderr
        file = Path(rules_file)
        file.write_text(f"host all {ROLE} 127.0.0.1/32 scram-sha-256\n{file.read_text()}")
        with psycopg.connect(url.render_as_string(), autocommit=True) as owner:
            owner.execute("SELECT pg_reload_conf()")
        database = make_url(server.url).set(database="permille")
        migrate(database.render_as_string(), worker_role=ROLE)
        as_worker = url.set(database="permille", username=ROLE)
        for password in (None, HARD_PASSWORD.strip("'")):
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(as_worker.set(password=password).render_as_string(hide_password=False))
        known = as_worker.set(password=HARD_PASSWORD).render_as_string(hide_password=False)
        with psycopg.connect(known) as worker:
            assert worker.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                worker.execute("SELECT token_hash FROM operator_tokens")


def add_inputs(api: Api) -> tuple[str, str]:
    """Register a model and a corpus, and return their ids."""
    source = {"kind": "folder", "path": "tiny"}
    model = api.post("/v1/models", {"name": "tiny", "source": source}).json()["id"]
    source = {"kind": "file", "path": "texts.jsonl"}
    return model, api.post("/v1/corpora", {"name": "texts", "source": source}).json()["id"]


def test_jobs_of_all_kinds_succeed(place: Place) -> None:
    api = place.api
    model, corpus = add_inputs(api)
    mask = {"method": "fisher", "corpus_id": corpus, "sequences": 8, "length": 16, "density": 0.01}
    build = {"model_id": model, "mask": mask, "quantization": {"scheme": "nf4"}}
    finish(place, "/v1/builds", build)
    cancelled = api.post("/v1/masks", {"model_id": model, "method": "random", "density": 0.02}).json()["id"]
    assert api.post(f"/v1/jobs/{cancelled}/cancel").status_code in (200, 202)
    rule = dict.fromkeys(("result_days", "job_days", "log_days", "report_days"), 1)
    assert api.put("/v1/retention", {**rule, "keep_newest": 0}).status_code == 200
    place.moments[0] += timedelta(days=40)
    rules.apply_all(place.worker.service.database)
    sweep(place)
    assert api.get("/v1/packages").json()["items"] == []
    assert api.get("/v1/audit?after=0&limit=200").json()[-1]["action"] == "apply_retention"


@pytest.mark.attack(
    26, "a worker's password makes an administrator, a device or a release, or hides what was done"
)
@pytest.mark.parametrize("statement", FORBIDDEN)
def test_the_role_may_not(place: Place, statement: str) -> None:
    with (
        psycopg.connect(place.url.replace("+psycopg", "")) as connection,
        pytest.raises(psycopg.Error) as refused,
    ):
        connection.execute(statement.encode())
    # `insufficient_privilege`; a refused SET ROLE may also be an invalid one.
    assert refused.value.sqlstate == "42501", refused.value


def test_every_table_has_its_privileges() -> None:
    assert PRIVILEGES.keys() == {*tables.Base.metadata.tables, "alembic_version"}


def test_a_worker_with_its_own_role_does_not_migrate(tmp_path: Path) -> None:
    with postgres_server() as server:
        url = make_role(server)
        with pytest.raises(RetryableError, match="Start the API of this version first"):
            migrate(url)
        for _ in range(2):
            migrate(server.url, worker_role=ROLE)
        migrate(url)
        with psycopg.connect(server.url.replace("+psycopg", "")) as backup:
            backup.execute("SELECT 1 FROM audit_entries")
            migrate(server.url, worker_role=ROLE)  # A backup that reads for hours delays no start.
        with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as owner:
            owner.execute("UPDATE alembic_version SET version_num = '0000'")
            with pytest.raises(OperatorError, match="newer version"):
                migrate(url)
            owner.execute("DELETE FROM alembic_version")
        with pytest.raises(RetryableError, match="Start the API of this version first"):
            migrate(url)


@pytest.mark.parametrize(
    ("role", "words"), [("nobody", "has no role nobody"), ("permille", "may do all that the API may")]
)
def test_a_role_that_protects_nothing_is_refused(server: Server, role: str, words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        migrate(server.url, worker_role=role)


def test_sqlite_has_no_roles(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="Only PostgreSQL has roles"):
        migrate(f"sqlite:///{tmp_path}/permille.db", worker_role=ROLE)
