"""Runs: metrics have a closed schema, and logs are bounded, private and erasable."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from permille.digests import digest_of
from permille.schemas.runs import LOG_MEDIA_TYPE, STATE_MEDIA_TYPE, RunMetrics
from permille.store import runs, tables
from tests.api_service import Api, TestDevice, new_run_id, run_metrics, running_api
from tests.unit.store.postgres import postgres_server
from tests.unit.store.test_logs_at_once import wait_until_it_waits


def put_log(api: Api, run_id: str, content: Any, token: str, media_type: str = LOG_MEDIA_TYPE) -> Any:
    headers = api.auth(token) | {"Content-Type": media_type}
    return api.client.put(f"/v1/runs/{run_id}/log", content=content, headers=headers)


def kept(api: Api) -> list[bytes]:
    """Return the bytes of all files in the blob folder, including parts of uploads."""
    return [path.read_bytes() for path in api.service.settings.blob_root.rglob("*") if path.is_file()]


def reported(api: Api, device: TestDevice) -> tuple[str, str]:
    """Report a run of the device. Return its id and a token."""
    token, run_id = device.token(), new_run_id()
    body = {"run_id": run_id, "metrics": run_metrics()}
    assert api.post("/v1/runs", body, token).status_code == 201
    return run_id, token


def test_an_agent_that_measures_no_general_loss_reports_as_before(api: Api) -> None:
    token, run_id = api.device().token(), new_run_id()
    new = {"general_loss_base", "general_loss_personal", "strength", "scaled_digest"}
    body = {"run_id": run_id, "metrics": {k: v for k, v in run_metrics().items() if k not in new}}
    assert api.post("/v1/runs", body, token).status_code == 201
    assert api.post("/v1/runs", body, token).status_code == 200
    assert {api.get(f"/v1/runs/{run_id}", token).json()["metrics"][name] for name in new} == {None}


@pytest.mark.parametrize(("steps", "status"), [(run_metrics()["steps"], 200), (11, 409)])
def test_a_report_that_comes_twice_at_once_is_stored_once(tmp_path: Path, steps: int, status: int) -> None:
    """The second request looks for the run before the first one has committed it."""
    with postgres_server() as server, running_api(tmp_path, database_url=server.url) as api:
        device, run_id = api.device(), new_run_id()
        token, body = device.token(), {"run_id": run_id, "metrics": run_metrics(steps=steps)}
        first = RunMetrics.model_validate(run_metrics()).model_dump(mode="json", exclude_unset=True)
        db = api.service.database
        with db.read() as session:
            tenant_id = session.get_one(tables.Device, device.id).tenant_id
        with ThreadPoolExecutor(1) as pool:
            with db.write() as session:
                runs.report(session, tenant_id=tenant_id, device_id=device.id, run_id=run_id, metrics=first)
                session.flush()
                second = pool.submit(api.post, "/v1/runs", body, token)
                wait_until_it_waits(db, second)
            assert second.result(60).status_code == status
        assert len(api.get("/v1/runs").json()["items"]) == 1


def test_same_report_again_changes_nothing_and_another_is_a_conflict(api: Api) -> None:
    token, run_id = api.device().token(), new_run_id()
    body = {"run_id": run_id, "metrics": run_metrics()}
    first, again = api.post("/v1/runs", body, token), api.post("/v1/runs", body, token)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert first.json()["metrics"] == run_metrics()
    assert first.json()["ended_at"] == run_metrics()["ended_at"] < first.json()["created_at"]
    other = {"run_id": run_id, "metrics": run_metrics(steps=11)}
    assert api.post("/v1/runs", other, token).status_code == 409
    assert len(api.get("/v1/runs").json()["items"]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"note": "my diary"},
        {"outcome": "my diary"},
        {"engine": "my diary"},
        {"agent_version": "my diary"},
        {"release": "my diary"},
        {"loss_base": "3.0"},
        {"steps": -1},
        {"steps": 2**53},
        {"seconds": 1e300},
        {"ended_at": "my diary"},
        {"ended_at": "2026-11-20T10:00:00"},
    ],
)
def test_report_carries_numbers_and_closed_sets_only(api: Api, change: dict[str, Any]) -> None:
    token = api.device().token()
    body = {"run_id": new_run_id(), "metrics": run_metrics(**change)}
    answer = api.post("/v1/runs", body, token)
    assert answer.status_code == 422
    assert "diary" not in answer.text


def test_log_is_stored_and_queued_once(api: Api) -> None:
    run_id, token = reported(api, api.device())
    first = put_log(api, run_id, b"log bytes", token)
    again = put_log(api, run_id, b"log bytes", token)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json() == again.json()
    assert api.get(f"/v1/jobs/{first.json()['job_id']}").json()["kind"] == "replay"
    log = api.get(f"/v1/runs/{run_id}", token).json()["log"]
    assert (log["state"], log["log_digest"]) == ("pending", digest_of(b"log bytes"))
    assert (log["form"], log["size_bytes"]) == ("log", 9)
    assert log["job_id"] == first.json()["job_id"]


def test_log_whose_replay_was_cancelled_is_undecided_until_it_is_sent_again(api: Api) -> None:
    run_id, token = reported(api, api.device())
    job_id = put_log(api, run_id, b"log bytes", token).json()["job_id"]
    api.post(f"/v1/jobs/{job_id}/cancel")
    log = api.get(f"/v1/runs/{run_id}", token).json()["log"]
    assert (log["state"], log["reason"]) == ("undecided", "replay-cancelled")
    assert put_log(api, run_id, b"log bytes", token).json() == {"job_id": job_id}
    assert api.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"
    log = api.get(f"/v1/runs/{run_id}", token).json()["log"]
    assert (log["state"], log["reason"]) == ("pending", None)


def test_an_operator_finds_the_job_of_each_undecided_log_and_retries_it(api: Api) -> None:
    device = api.device()
    sent = {}
    for content in (b"first", b"second"):
        run_id, token = reported(api, device)
        sent[run_id] = put_log(api, run_id, content, token).json()["job_id"]
        api.post(f"/v1/jobs/{sent[run_id]}/cancel")
    found = {run["run_id"]: run["log"] for run in api.get("/v1/runs").json()["items"]}
    assert {run_id: (log["state"], log["job_id"]) for run_id, log in found.items()} == {
        run_id: ("undecided", job_id) for run_id, job_id in sent.items()
    }
    for run_id, log in found.items():
        assert api.post(f"/v1/jobs/{log['job_id']}/retry").status_code == 202
        assert api.get(f"/v1/runs/{run_id}").json()["log"]["state"] == "pending"


def test_the_document_says_what_the_job_of_a_log_is_for(api: Api) -> None:
    field = api.get("/openapi.json").json()["components"]["schemas"]["RunLog"]["properties"]["job_id"]
    assert "retry" in field["description"]
    kinds = {kind["type"]: kind for kind in field["anyOf"]}
    assert set(kinds) == {"string", "null"}
    assert [example.partition("_")[0] for example in kinds["string"]["examples"]] == ["job"]


def test_a_state_comes_in_a_logs_place_and_is_erased_as_one(api: Api) -> None:
    device = api.device()
    run_id, token = reported(api, device)
    assert put_log(api, run_id, b"state bytes", token, STATE_MEDIA_TYPE).status_code == 202
    assert api.get(f"/v1/runs/{run_id}").json()["log"]["form"] == "state"
    assert put_log(api, run_id, b"state bytes", token).status_code == 409, "the same bytes as a log"
    assert api.delete(f"/v1/runs/{run_id}/log", token).status_code == 204
    assert b"state bytes" not in kept(api)
    assert put_log(api, run_id, b"log bytes", token).status_code == 202
    assert api.get(f"/v1/runs/{run_id}").json()["log"]["form"] == "log"


@pytest.mark.attack(13, "sends a state for another device's run")
def test_a_state_for_another_devices_run_leaves_no_bytes(api: Api) -> None:
    run_id, _ = reported(api, api.device())
    assert put_log(api, run_id, b"state", api.device().token(), STATE_MEDIA_TYPE).status_code == 404
    assert b"state" not in kept(api)
    assert api.get(f"/v1/runs/{run_id}").json()["log"] is None


def test_second_log_of_a_run_is_refused_and_leaves_no_bytes(api: Api) -> None:
    run_id, token = reported(api, api.device())
    put_log(api, run_id, b"first", token)
    assert put_log(api, run_id, b"second", token).status_code == 409
    assert b"second" not in kept(api)
    assert b"first" in kept(api)


def test_log_leaves_no_bytes_where_the_database_fails(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OperationalError("INSERT", {}, Exception("database is locked"))

    run_id, token = reported(api, api.device())
    monkeypatch.setattr("permille.store.runs.attach_log", fail)
    assert put_log(api, run_id, b"log bytes", token).status_code == 503
    assert b"log bytes" not in kept(api)


def test_log_is_erased_on_request_with_its_bytes(api: Api) -> None:
    device = api.device()
    run_id, token = reported(api, device)
    put_log(api, run_id, b"log bytes", token)
    assert api.delete(f"/v1/runs/{run_id}/log", token).status_code == 204
    assert api.delete(f"/v1/runs/{run_id}/log", token).status_code == 204
    assert b"log bytes" not in kept(api)
    assert api.get(f"/v1/runs/{run_id}").json()["log"] is None


def test_equal_logs_of_two_runs_are_erased_with_the_last(api: Api) -> None:
    device = api.device()
    first, token = reported(api, device)
    second, _ = reported(api, device)
    put_log(api, first, b"equal", token)
    put_log(api, second, b"equal", token)
    api.delete(f"/v1/runs/{first}/log")
    assert kept(api) == [b"equal"]
    api.delete(f"/v1/runs/{second}")
    assert b"equal" not in kept(api)
    assert api.get(f"/v1/runs/{second}").status_code == 404


def test_log_of_another_device_is_out_of_reach(api: Api) -> None:
    run_id, _ = reported(api, api.device())
    other = api.device().token()
    assert put_log(api, run_id, b"x", other).status_code == 404
    assert api.get(f"/v1/runs/{run_id}", other).status_code == 404
    assert api.delete(f"/v1/runs/{run_id}/log", other).status_code == 404
    body = {"run_id": run_id, "metrics": run_metrics()}
    assert api.post("/v1/runs", body, other).status_code == 409
    assert b"x" not in kept(api)


def test_log_is_bounded_and_has_its_media_type(tmp_path: Path) -> None:
    with running_api(tmp_path, max_log_bytes=4096) as api:
        run_id, token = reported(api, api.device())
        assert put_log(api, run_id, b"a" * 4097, token).status_code == 413
        assert put_log(api, run_id, iter([b"a" * 4096, b"a"]), token).status_code == 413
        assert put_log(api, run_id, b"a", token, "text/plain").status_code == 415
        assert kept(api) == []
        assert put_log(api, run_id, b"a" * 4096, token).status_code == 202


def test_no_route_reads_a_log_back(api: Api) -> None:
    run_id, token = reported(api, api.device())
    put_log(api, run_id, b"a secret log", token)
    for path in (f"/v1/runs/{run_id}", "/v1/runs"):
        assert "secret" not in api.get(path).text
    assert api.get(f"/v1/runs/{run_id}/log").status_code == 405
