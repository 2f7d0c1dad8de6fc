"""A tenant with many tokens and many requests does not take the share of the others."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from permille.store import audit, inputs
from permille_service.jobs.stream import MAX_STREAMS_PER_TENANT, MAX_STREAMS_PER_TOKEN
from tests.api_service import Api, running_api
from tests.running_service import running_service
from tests.tiny_model import write_model


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path) as running:
        yield running


def entries(api: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get("/v1/audit?after=0&limit=200").json()
    return found


@pytest.mark.attack(28, "twenty tokens of a tenant hold all event streams")
def test_a_tenant_cannot_hold_all_streams(tmp_path: Path) -> None:
    with running_service(tmp_path, "--no-worker") as running, running.client() as client, ExitStack() as held:
        write_model(running.data_dir / "models" / "tiny")
        body: dict[str, Any] = {"name": "tiny", "source": {"kind": "folder", "path": "tiny"}}
        model = client.post("/v1/models", json=body).json()["id"]
        job = client.post("/v1/masks", json={"model_id": model, "method": "random"}).json()["id"]
        path = f"/v1/jobs/{job}/events/stream"

        def opened(token: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            asking = httpx.Client(base_url=running.url, headers=headers, trust_env=False, timeout=60.0)
            answer = held.enter_context(held.enter_context(asking).stream("GET", path))
            return answer.status_code

        tokens = [
            client.post("/v1/tokens", json={"name": f"t{number}", "role": "viewer"}).json()["secret"]
            for number in range(MAX_STREAMS_PER_TENANT // MAX_STREAMS_PER_TOKEN + 1)
        ]
        for token in tokens[:-1]:
            assert {opened(token) for _ in range(MAX_STREAMS_PER_TOKEN)} == {200}
        assert opened(tokens[-1]) == 429
        tenant = client.post("/v1/tenants", json={"name": "other"}).json()["id"]
        body = {"name": "t", "role": "admin", "tenant_id": tenant}
        other = client.post("/v1/tokens", json=body).json()["secret"]
        # The other tenant does not see this job, but a slot would be free for one of its own.
        assert opened(other) == 404


@pytest.mark.attack(28, "changes without end fill the audit log")
def test_a_tenant_makes_a_limited_number_of_changes_a_day(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    token = api.post("/v1/tokens", {"name": "stolen", "role": "admin"}).json()
    noted = len(entries(api))
    monkeypatch.setattr(audit, "MAX_CHANGES_A_DAY", noted + 2)
    streamed = {"source": {"kind": "streamed", "dataset": "c4"}}
    statuses = [
        api.post("/v1/corpora", {"name": f"c{number}", **streamed}, token["secret"]).status_code
        for number in range(4)
    ]
    assert statuses == [201, 201, 429, 429]
    refused = api.post("/v1/corpora", {"name": "late", **streamed}, token["secret"])
    assert int(refused.headers["retry-after"]) > 80_000
    assert api.delete(f"/v1/tokens/{token['id']}").status_code == 204, "a stolen token can still be revoked"
    assert len(entries(api)) == noted + 3


@pytest.mark.attack(28, "models and texts without end fill the database")
def test_a_tenant_has_a_limited_number_of_inputs(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_INPUTS", 2)
    hub = {"kind": "hub", "repository": "a/b", "commit": "0" * 40}
    streamed = {"kind": "streamed", "dataset": "c4"}
    for path, body in (
        ("/v1/models", {"source": hub}),
        ("/v1/corpora", {"source": streamed}),
    ):
        answers = [api.post(path, {"name": f"n{number}", **body}) for number in range(3)]
        assert [answer.status_code for answer in answers] == [201, 201, 409], answers[0].text
        assert "2 of 2 possible" in answers[2].json()["detail"]
