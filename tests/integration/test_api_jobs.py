"""Jobs over the API: accepted or refused with numbers, followed by list and stream, cancelled, retried."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from permille.schemas.jobs import JobKind
from permille.schemas.problems import TYPE_BASE
from permille.store.artifacts import TaskResult
from permille.store.jobs import claims
from permille.store.jobs.dispatch import note_worker
from permille_service.preflights import estimates
from tests.api_service import Api, running_api
from tests.artifacts import add_artifact
from tests.tiny_model import write_corpus, write_model

MASK = {"method": "random", "density": 0.01, "seed": 7}


@pytest.fixture
def stocked(tmp_path: Path) -> Iterator[Api]:
    """Run a service with a model folder `tiny` and a corpus file `texts.jsonl`."""
    write_model(tmp_path / "models" / "tiny")
    write_corpus(tmp_path / "corpora" / "texts.jsonl")
    roots: dict[str, Any] = {"model_root": tmp_path / "models", "corpus_root": tmp_path / "corpora"}
    with running_api(tmp_path, stream_s=2.0, **roots) as api:
        yield api


def add_model(api: Api) -> str:
    answer = api.post("/v1/models", {"name": "tiny", "source": {"kind": "folder", "path": "tiny"}})
    assert answer.status_code == 201, answer.text
    model_id: str = answer.json()["id"]
    return model_id


def add_corpus(api: Api) -> str:
    source = {"kind": "file", "path": "texts.jsonl"}
    corpus_id: str = api.post("/v1/corpora", {"name": "texts", "source": source}).json()["id"]
    return corpus_id


def add_mask(api: Api, **options: Any) -> dict[str, Any]:
    answer = api.post("/v1/masks", {"model_id": add_model(api), **MASK}, **options)
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    return job


def test_more_sequences_than_a_corpus_can_hold_are_refused(stocked: Api) -> None:
    names = {"model_id": add_model(stocked), "corpus_id": add_corpus(stocked)}
    answer = stocked.post("/v1/masks", {"method": "fisher", **names, "sequences": 10_000, "length": 512})
    assert answer.status_code == 409
    assert "cannot hold 10000 sequences of 128 tokens" in answer.json()["detail"]


def test_a_corpus_needs_no_more_text_than_the_positions_of_the_model_take(stocked: Api) -> None:
    names = {"model_id": add_model(stocked), "corpus_id": add_corpus(stocked)}
    size_bytes = (stocked.service.settings.corpus_root / "texts.jsonl").stat().st_size
    for length in (128, 512, 32_768):  # the model has 128 positions
        body = {"method": "fisher", **names, "sequences": size_bytes // 128, "length": length}
        assert stocked.post("/v1/masks", body).status_code == 202


def test_a_tenant_may_queue_only_so_many_jobs(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "tiny")
    with running_api(tmp_path, model_root=tmp_path / "models", queued_jobs_per_tenant=2) as api:
        body = {"model_id": add_model(api), "method": "random", "density": 0.01}
        first, second, third = (
            api.post("/v1/masks", {**body, "seed": seed}, key=f"mask-{seed}") for seed in range(3)
        )
        assert (first.status_code, second.status_code, third.status_code) == (202, 202, 429)
        assert third.json()["type"] == f"{TYPE_BASE}too-many-requests"
        assert third.headers["retry-after"] == "60"
        again = api.post("/v1/masks", {**body, "seed": 0}, key="mask-0")
        assert again.json()["id"] == first.json()["id"]  # the same job, so nothing new is queued
        job = f"/v1/jobs/{first.json()['id']}"
        assert api.post(f"{job}/cancel").json()["state"] == "cancelled"
        assert api.post("/v1/masks", {**body, "seed": 2}).status_code == 202
        assert api.post(f"{job}/retry").status_code == 429


def test_job_is_accepted_with_its_place_and_payload(stocked: Api) -> None:
    model_id, corpus_id = add_model(stocked), add_corpus(stocked)
    body = {"method": "fisher", "model_id": model_id, "corpus_id": corpus_id, "sequences": 8, "length": 32}
    job = stocked.post("/v1/masks", body).json()
    assert (job["kind"], job["state"], job["progress"]["fraction"]) == ("mask", "queued", 0.0)
    with stocked.service.database.write() as session:
        claim = claims.claim(session, worker="test", lease_s=60)
    assert claim is not None
    assert claim.payload == {
        "model_id": model_id,
        "corpus_id": corpus_id,
        "method": "fisher",
        "density": 0.001,
        "sequences": 8,
        "length": 32,
        "seed": 0,
        "scope": "all",
    }


@pytest.mark.parametrize("scope", ["attention", "mlp", "layers:1-"])
def test_a_mask_may_be_of_a_part_of_the_weights(stocked: Api, scope: str) -> None:
    request = {"method": "random", "model_id": add_model(stocked), "scope": scope}
    assert stocked.post("/v1/masks", request).status_code == 202
    needs = stocked.post("/v1/preflights", {"kind": "mask", "request": request}).json()
    assert needs["accepted"] is True


def test_same_key_is_the_same_job_and_another_body_a_conflict(stocked: Api) -> None:
    model_id = add_model(stocked)
    first = stocked.post("/v1/masks", {"model_id": model_id, **MASK}, key="m-1")
    again = stocked.post("/v1/masks", {"model_id": model_id, **MASK}, key="m-1")
    assert first.json()["id"] == again.json()["id"]
    other = stocked.post("/v1/masks", {"model_id": model_id, **MASK, "seed": 8}, key="m-1")
    assert other.status_code == 409
    assert other.json()["type"] == TYPE_BASE + "idempotency-conflict"
    elsewhere = stocked.post("/v1/quantizations", {"model_id": model_id}, key="m-1")
    assert elsewhere.status_code == 409


@pytest.mark.parametrize(
    ("setting", "name"),
    [({"memory_bytes": 1_000_000}, "memory"), ({}, "disk")],
)
def test_work_that_the_machine_cannot_hold_is_refused_with_figures(
    tmp_path: Path, setting: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "disk":
        monkeypatch.setattr(estimates, "_free_disk", lambda _folder: 1)
    write_model(tmp_path / "models" / "tiny")
    with running_api(tmp_path, model_root=tmp_path / "models", **setting) as api:
        model_id = add_model(api)
        body = {"model_id": model_id, "mask": MASK}
        for path, request in (("/v1/masks", {"model_id": model_id, **MASK}), ("/v1/builds", body)):
            answer = api.post(path, request)
            assert answer.status_code == 409
            assert answer.json()["type"] == TYPE_BASE + "preflight-refused"
            missing = [figure for figure in answer.json()["figures"] if not figure["enough"]]
            assert [figure["name"] for figure in missing] == [name]
            assert missing[0]["needed"] > missing[0]["available"]
        asked = api.post("/v1/preflights", {"kind": "build", "request": body})
        assert (asked.status_code, asked.json()["accepted"]) == (200, False)
        assert api.get("/v1/jobs").json()["items"] == []


def test_the_memory_of_the_largest_worker_decides_and_not_that_of_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("permille.machine_memory._system_memory", lambda: 1)
    write_model(tmp_path / "models" / "tiny")
    with running_api(tmp_path, model_root=tmp_path / "models") as api:
        body = {"kind": "mask", "request": {"model_id": add_model(api), **MASK}}
        for name, memory_bytes, accepted in (
            ("no worker has reported", None, True),
            ("small", 1_000_000, False),
            ("large", 2**40, True),
        ):
            if memory_bytes is not None:
                with api.service.database.write() as session:
                    note_worker(session, name=name, exports=False, memory_bytes=memory_bytes)
            answer = api.post("/v1/preflights", body).json()
            assert answer["accepted"] is accepted, name
            assert answer["figures"][0]["available"] == memory_bytes


def test_repeated_request_is_answered_even_when_the_machine_is_full_now(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "tiny")
    with running_api(tmp_path, model_root=tmp_path / "models") as api:
        body = {"model_id": add_model(api), **MASK}
        job_id = api.post("/v1/masks", body, key="k").json()["id"]
    with running_api(tmp_path, model_root=tmp_path / "models", memory_bytes=1) as api:
        assert api.post("/v1/masks", body, key="k").json()["id"] == job_id
        assert api.post("/v1/masks", body, key="other").status_code == 409


def test_a_package_of_parts_without_text_takes_no_basis(stocked: Api) -> None:
    model = {"model_id": add_model(stocked)}
    requests: dict[JobKind, dict[str, object]] = {
        JobKind.MASK: {**model, **MASK},
        JobKind.QUANTIZATION: {**model, "options": {"scheme": "nf4"}},
    }
    made = []
    for number, (kind, request) in enumerate(requests.items()):
        result = TaskResult(digest=f"sha256:{number:064d}", provenance={}, blobs=(), k=1, **model)
        with stocked.service.database.write() as session:
            made.append(
                add_artifact(session, tenant_id=stocked.tenant_id, kind=kind, request=request, made=result)
            )
    parts = {"mask_id": made[0].id, "quantization_id": made[1].id}
    refused = stocked.post("/v1/packages", {**parts, "basis": True})
    assert (refused.status_code, "needs public text" in refused.json()["detail"]) == (409, True)
    assert stocked.post("/v1/packages", parts).status_code == 202


AUTO_ROUND = {"scheme": "auto-round"}


def test_parts_that_do_not_exist_or_fit_are_refused(stocked: Api) -> None:
    model_id = add_model(stocked)
    nobody = "01jd3kq8z7m4n5p6r7s8t9v0wx"
    refused = {
        "unknown model": ("/v1/masks", {"model_id": f"model_{nobody}", **MASK}, 404),
        "unknown corpus": (
            "/v1/masks",
            {"model_id": model_id, "method": "fisher", "corpus_id": f"corpus_{nobody}"},
            404,
        ),
        "fisher without corpus": ("/v1/masks", {"model_id": model_id, "method": "fisher"}, 422),
        "scope outside": ("/v1/masks", {"model_id": model_id, **MASK, "scope": "layers:40-50"}, 409),
        "scope unknown": ("/v1/masks", {"model_id": model_id, **MASK, "scope": "norms"}, 422),
        "nf4 in groups of 32": (
            "/v1/quantizations",
            {"model_id": model_id, "options": {"scheme": "nf4", "group_size": 32}},
            422,
        ),
        "unknown corpus to calibrate on": (
            "/v1/quantizations",
            {"model_id": model_id, "options": {**AUTO_ROUND, "calibration_corpus_id": f"corpus_{nobody}"}},
            404,
        ),
        "a build with it": (
            "/v1/builds",
            {
                "model_id": model_id,
                "mask": MASK,
                "quantization": {**AUTO_ROUND, "calibration_corpus_id": f"corpus_{nobody}"},
            },
            404,
        ),
        "nothing to calibrate on": ("/v1/quantizations", {"model_id": model_id, "options": AUTO_ROUND}, 422),
        "no such scheme": ("/v1/quantizations", {"model_id": model_id, "options": {"scheme": "nf5"}}, 422),
        "unknown field": ("/v1/quantizations", {"model_id": model_id, "mask_id": f"mask_{nobody}"}, 422),
        "neither mask nor adapter": ("/v1/builds", {"model_id": model_id}, 422),
        "a rank too high": (
            "/v1/builds",
            {"model_id": model_id, "adapter": {"kind": "lora-fa", "rank": 33}},
            409,
        ),
        "a basis without text": (
            "/v1/builds",
            {"model_id": model_id, "adapter": {"kind": "lora-fa", "rank": 4}, "basis": True},
            409,
        ),
        "unknown parts": (
            "/v1/packages",
            {"mask_id": f"mask_{nobody}", "quantization_id": f"quant_{nobody}"},
            404,
        ),
    }
    for name, (path, body, status) in refused.items():
        assert stocked.post(path, body).status_code == status, name
    assert stocked.get("/v1/jobs").json()["items"] == []


def test_build_has_children_and_is_cancelled_with_them(stocked: Api) -> None:
    body = {"model_id": add_model(stocked), "mask": MASK}
    job = stocked.post("/v1/builds", body).json()
    kinds = {stocked.get(f"/v1/jobs/{child}").json()["kind"] for child in job["children"]}
    assert kinds == {"mask", "quantization"}
    build = stocked.get(f"/v1/builds/{job['id']}").json()
    assert (build["state"], build["package_digest"]) == ("running", None)
    assert stocked.post(f"/v1/jobs/{job['id']}/cancel").json()["state"] == "cancelled"
    assert {item["state"] for item in stocked.get("/v1/jobs").json()["items"]} == {"cancelled"}
    assert stocked.get(f"/v1/builds/{job['children'][0]}").status_code == 404


def test_cancelled_job_is_retried_and_a_queued_one_is_not(stocked: Api) -> None:
    job = add_mask(stocked)
    path = f"/v1/jobs/{job['id']}"
    assert stocked.post(f"{path}/retry").status_code == 409
    assert stocked.post(f"{path}/cancel").json()["state"] == "cancelled"
    assert stocked.post(f"{path}/cancel").json()["state"] == "cancelled"
    assert stocked.post(f"{path}/retry").json()["state"] == "queued"


def test_events_are_listed_after_a_number(stocked: Api) -> None:
    job = add_mask(stocked)
    stocked.post(f"/v1/jobs/{job['id']}/cancel")
    events = stocked.get(f"/v1/jobs/{job['id']}/events").json()
    assert [event["seq"] for event in events] == [1, 2, 3]
    rest = stocked.get(f"/v1/jobs/{job['id']}/events", params={"after": 2}).json()
    assert rest == events[2:]


def stream(api: Api, job_id: str, last: int | None = None) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Read a stream to its end. Return its status, events and ids."""
    headers = api.auth() | ({} if last is None else {"Last-Event-ID": str(last)})
    answer = api.client.get(f"/v1/jobs/{job_id}/events/stream", headers=headers)
    lines = answer.text.splitlines()
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    return answer.status_code, data, [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]


def test_stream_tells_all_ends_with_the_job_and_is_resumed(stocked: Api) -> None:
    job = add_mask(stocked)
    stocked.post(f"/v1/jobs/{job['id']}/cancel")
    status, events, ids = stream(stocked, job["id"])
    assert status == 200
    assert ids == ["1", "2", "3"]
    assert events == stocked.get(f"/v1/jobs/{job['id']}/events").json()
    assert stream(stocked, job["id"], 2)[2] == ["3"]
    assert stream(stocked, job["id"], 3)[0] == 204


def test_job_names_what_it_made(stocked: Api) -> None:
    job = add_mask(stocked)
    assert (job["result"], job["result_id"]) == (None, None)
    mask_id = "mask_01jd3kq8z7m4n5p6r7s8t9v0wx"
    with stocked.service.database.write() as session:
        claim = claims.claim(session, worker="w", lease_s=30.0)
        assert claim is not None
        claims.complete(session, claim, result_id=mask_id)
    job = stocked.get(f"/v1/jobs/{job['id']}").json()
    assert (job["result"], job["result_id"]) == (f"/v1/masks/{mask_id}", mask_id)


def test_stream_of_an_open_job_ends_after_its_time(stocked: Api) -> None:
    job = add_mask(stocked)
    status, _, ids = stream(stocked, job["id"])
    assert (status, ids) == (200, ["1"])
    assert stream(stocked, job["id"], 1)[:2] == (200, [])
