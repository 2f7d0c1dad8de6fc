"""Results of jobs can be removed if nothing uses them. Yanking says how many devices have the version."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from permille.schemas.access import Role
from permille.schemas.jobs import JobKind
from permille.store import artifacts, devices
from permille.store.artifacts import Blob, TaskResult
from permille.store.jobs import claims, queue
from permille.store.jobs.transitions import NewJob
from permille.store.tables import Artifact, Job
from tests.api_service import Api, running_api
from tests.artifacts import add_artifact, some_model

DIGESTS = {kind: f"sha256:{number:064d}" for number, kind in enumerate(JobKind)}


def make(api: Api, kind: JobKind, **request: Any) -> Artifact:
    """Make an artifact of this kind with a job for this request."""
    with api.service.database.write() as session:
        model_id = some_model(session, api.tenant_id)
        layer = Blob(role="mask", media_type="x", digest=DIGESTS[kind], size_bytes=1)
        made = TaskResult(model_id=model_id, digest=DIGESTS[kind], provenance={}, blobs=(layer,), k=1)
        return add_artifact(session, tenant_id=api.tenant_id, kind=kind, request=request, made=made)


def test_parts_can_be_removed_once_what_was_made_of_them_is(api: Api) -> None:
    mask, quantization = make(api, JobKind.MASK, method="random"), make(api, JobKind.QUANTIZATION)
    package = make(api, JobKind.PACKAGE, mask_id=mask.id, quantization_id=quantization.id)
    paths = (f"/v1/masks/{mask.id}", f"/v1/quantizations/{quantization.id}", f"/v1/packages/{package.digest}")
    refused = api.delete(paths[0])
    assert (refused.status_code, package.digest in refused.json()["detail"]) == (409, True)
    assert api.delete(paths[2], api.operator(Role.VIEWER)).status_code == 403
    assert api.delete(paths[2], api.operator(Role.ADMIN, tenant="acme")).status_code == 404
    for path in reversed(paths):
        assert api.delete(path).status_code == 204, path
        assert api.delete(path).status_code == 404
    assert [one["action"] for one in api.get("/v1/audit?limit=200").json()][-3:] == [
        "delete_package",
        "delete_quantization",
        "delete_mask",
    ]


def test_what_a_release_or_an_unfinished_job_names_stays(api: Api) -> None:
    package = api.package()
    path = f"/v1/packages/{package.digest}"
    with api.service.database.write() as session:
        payload = {"package_digest": package.digest, "weights": "float32"}
        job = queue.submit(session, NewJob(tenant_id=api.tenant_id, kind=JobKind.EXPORT, payload=payload))
    assert job.id in api.delete(path).json()["detail"]
    assert api.delete(f"/v1/exports/{job.id}").status_code == 409
    api.post(f"/v1/jobs/{job.id}/cancel")
    assert api.delete(f"/v1/builds/{job.id}").status_code == 404, "it is no build"
    assert api.delete(f"/v1/exports/{job.id}").status_code == 204
    assert api.get(f"/v1/jobs/{job.id}").status_code == 404
    api.publish(package)
    assert "release tiny version 1" in api.delete(path).json()["detail"]


def test_a_build_goes_with_its_parts_once_their_results_are_gone(api: Api) -> None:
    with api.service.database.write() as session:
        model_id = some_model(session, api.tenant_id)
        payload = {"model_id": model_id, "mask": {"method": "random"}}
        build = queue.submit(session, NewJob(tenant_id=api.tenant_id, kind=JobKind.BUILD, payload=payload))
        part = queue.parts_of(session, build)[0]
        claim = claims.claim(session, worker="w", lease_s=60, job_id=part.id)
        assert claim is not None
    path = f"/v1/builds/{build.id}"
    assert api.delete(path).status_code == 409, "it has not ended"
    with api.service.database.write() as session:
        mask = artifacts.add(
            session, job=claim, made=TaskResult(model_id=model_id, digest="sha256:x", provenance={}, blobs=())
        )
        claims.fail(session, claim, error={"type": "InputError", "message": "no"}, retryable=False)
    quantization = make(api, JobKind.QUANTIZATION)
    package = make(api, JobKind.PACKAGE, mask_id=mask.id, quantization_id=quantization.id)
    with api.service.database.write() as session:
        for seconds, one in enumerate((quantization, package), 1):
            row = session.get_one(Artifact, one.id)
            row.job_id, row.created_at = part.id, mask.created_at + timedelta(seconds=seconds)
    left = f"remove package {package.digest}, then quantization {quantization.id}, then mask {mask.id}"
    assert left in api.delete(path).json()["detail"], "none names one that goes before it"
    assert api.delete(f"/v1/packages/{package.digest}").status_code == 204
    assert api.delete(f"/v1/quantizations/{quantization.id}").status_code == 204
    assert f"mask {mask.id} was made from {model_id}" in api.delete(f"/v1/models/{model_id}").json()["detail"]
    assert api.delete(f"/v1/masks/{mask.id}").status_code == 204
    assert api.delete(path).status_code == 204
    assert api.get(f"/v1/jobs/{part.id}").status_code == 404


def test_a_sparsification_without_its_model_answers_no_equal_request(api: Api) -> None:
    sparse = make(api, JobKind.SPARSIFICATION)
    with api.service.database.write() as session:
        row, job = session.get_one(Artifact, sparse.id), session.get_one(Job, sparse.job_id)
        row.made_model_id = row.model_id
        assert artifacts.has_result(session, job)
        row.made_model_id = None
        assert not artifacts.has_result(session, job)


@pytest.mark.parametrize("told", [0, 3])
def test_yanking_says_how_many_devices_have_the_version(api: Api, told: int) -> None:
    api.publish(api.package())
    for _ in range(told):
        device = api.device()
        with api.service.database.write() as session:
            devices.touch(session, device_id=device.id, version=1)
    answer = api.post("/v1/releases/tiny/versions/1/yank", {"reason": "bad"}).json()
    assert (answer["devices"], answer["yanked"], answer["aliases"]) == (told, True, ["stable"])


def test_an_equal_request_gets_what_was_made_until_it_is_removed_or_its_corpus_changes(api: Api) -> None:
    path = api.service.settings.corpus_root / "texts.jsonl"
    path.write_text('{"text": "a story"}\n' * 100)
    source = {"kind": "file", "path": "texts.jsonl"}
    corpus = api.post("/v1/corpora", {"name": "texts", "source": source}).json()["id"]
    with api.service.database.write() as session:
        model_id = some_model(session, api.tenant_id)
    body = {"method": "fisher", "model_id": model_id, "corpus_id": corpus, "sequences": 2, "length": 16}

    def ask(changes: dict[str, Any] | None = None, query: str = "") -> tuple[int, str]:
        answer = api.post(f"/v1/masks{query}", body | (changes or {}))
        return answer.status_code, answer.json()["id"]

    status, first = ask()
    assert status == 202
    assert ask()[0] == 202, "nothing has been made yet"
    with api.service.database.write() as session:
        claim = claims.claim(session, worker="w", lease_s=60, job_id=first)
        assert claim is not None
        mask = artifacts.add(
            session, job=claim, made=TaskResult(model_id=model_id, digest="sha256:x", provenance={}, blobs=())
        )
        claims.complete(session, claim, result_id=mask.id)
    assert ask() == (200, first)
    parts = {"mask": {name: body[name] for name in body if name != "model_id"}}
    build = api.post("/v1/builds", {"model_id": model_id, **parts}).json()
    assert api.get(f"/v1/builds/{build['id']}").json()["mask_id"] == mask.id, "made before"
    anew = api.post("/v1/builds?again=true", {"model_id": model_id, **parts}).json()
    assert api.get(f"/v1/builds/{anew['id']}").json()["mask_id"] is None
    assert ask({"seed": 1})[0] == 202
    assert ask(query="?again=true")[0] == 202
    assert api.delete(f"/v1/corpora/{corpus}").status_code == 409
    other = path.with_suffix(".new")
    other.write_text('{"text": "another"}\n' * 100)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)
    assert ask()[0] == 202, "another file was moved over the corpus, as old as that was"
    for job in api.get("/v1/jobs?state=queued").json()["items"]:
        api.post(f"/v1/jobs/{job['id']}/cancel")
    assert api.delete(f"/v1/masks/{mask.id}").status_code == 204
    assert ask()[0] == 202, "its result was removed"
    for path_of in (f"/v1/corpora/{corpus}", f"/v1/models/{model_id}"):
        assert "job_" in api.delete(path_of).json()["detail"], "a job that waits names it"


def test_what_was_removed_is_collected_by_who_runs_the_machine(tmp_path: Path) -> None:
    with running_api(tmp_path, collection_grace_s=60.0, metrics_token="m" * 8) as api:
        blobs = api.service.blobs
        old, young = blobs.put_bytes(b"old"), blobs.put_bytes(b"young")
        os.utime(blobs.path(old), (1e9, 1e9))
        for token in (api.operator(Role.OPERATOR), api.operator(Role.ADMIN, tenant="acme")):
            assert api.post("/v1/blobs/collect", {}, token).status_code == 403
        told = api.post("/v1/blobs/collect?dry_run=true").json()
        assert told == {
            "dry_run": True,
            "stored_bytes": 8,
            "unreferenced_bytes": 8,
            "removed_bytes": 3,
            "removed_count": 1,
            "removed": [old],
        }
        assert blobs.has(old)
        assert api.post("/v1/blobs/collect").json() == {**told, "dry_run": False}
        assert [blob.digest for blob in blobs.entries()] == [young]
        assert [one["action"] for one in api.get("/v1/audit?limit=200").json()][-1:] == ["collect_blobs"]
        seen = api.client.get("/metrics", headers={"Authorization": f"Bearer {'m' * 8}"}).text
        assert "permille_blob_unreferenced_bytes 5.0" in seen
        assert "permille_blob_collection_timestamp_seconds" in seen


def test_an_administrator_sets_what_goes_by_itself(api: Api) -> None:
    nothing = {"result_days": None, "keep_newest": 3, "log_days": None, "report_days": None, "job_days": None}
    assert api.get("/v1/retention").json() == nothing
    assert api.put("/v1/retention", {"job_days": 1}, api.operator(Role.OPERATOR)).status_code == 403
    assert api.put("/v1/retention", {"job_days": 0}).status_code == 422
    rule = {**nothing, "result_days": 1, "keep_newest": 0}
    assert api.put("/v1/retention", {"result_days": 1, "keep_newest": 0}).json() == rule
    assert api.get("/v1/retention", api.operator(Role.VIEWER)).json() == rule
    assert api.get("/v1/retention", api.operator(Role.ADMIN, tenant="acme")).json() == nothing
    mask = make(api, JobKind.MASK)
    with api.service.database.write() as session:
        row = session.get_one(Artifact, mask.id)
        row.created_at -= timedelta(days=2)
    gone = {"packages": [], "quantizations": [], "masks": [mask.id], "logs": 0, "reports": 0, "jobs": 0}
    for dry_run in (True, True, False):
        asked = f"/v1/retention/apply?dry_run={str(dry_run).lower()}"
        assert api.post(asked).json() == {"dry_run": dry_run, **gone}
    assert api.delete(f"/v1/masks/{mask.id}").status_code == 404
    noted = [(one["action"], one["request"]) for one in api.get("/v1/audit?limit=200").json()]
    assert noted[-2:] == [("put_retention", rule), ("apply_retention", gone)]
