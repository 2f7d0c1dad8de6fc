"""Bases over the API: asked for, read back, refused where they do not fit."""

from typing import Any

import pytest

from permille.store import claims, results
from tests.api_service import Api
from tests.integration.test_api_jobs import MASK, add_corpus, add_mask, add_model, stocked

__all__ = ["stocked"]

NOBODY = "01jd3kq8z7m4n5p6r7s8t9v0wx"
DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
LAYER: dict[str, Any] = {
    "role": "mask",
    "media_type": "application/vnd.permille.mask+safetensors",
    "digest": DIGEST,
    "size_bytes": 40,
}


def finished_mask(api: Api, *, digest: str = DIGEST) -> str:
    """A mask row as a worker would write it."""
    model_id = add_model(api)
    job = api.post("/v1/masks", {"model_id": model_id, **MASK}).json()
    with api.service.database.write() as session:
        return results.add_mask(
            session,
            tenant_id=api.tenant_id,
            job_id=job["id"],
            model_id=model_id,
            corpus_id=None,
            options={"method": "random", "density": 0.01, "seed": 0, "scope": "all", "allocation": "tensor"},
            k=10,
            layer={**LAYER, "digest": digest},
            provenance={},
            scores_digest=None,
            report_digest=DIGEST,
            picture_digest=DIGEST,
        ).id


def finished_basis(api: Api, mask_id: str) -> str:
    """A basis row as a worker would write it."""
    corpus_id = add_corpus(api)
    job = api.post("/v1/bases", {"mask_id": mask_id, "corpus_id": corpus_id}).json()
    with api.service.database.write() as session:
        mask = results.get_mask(session, tenant_id=api.tenant_id, mask_id=mask_id)
        report = api.service.blobs.put_bytes(b'{"captured": []}')
        return results.add_basis(
            session,
            tenant_id=api.tenant_id,
            job_id=job["id"],
            model_id=mask.model_id,
            mask_id=mask_id,
            corpus_id=corpus_id,
            options={"sequences": 256, "length": 128, "rank": 32, "seed": 0},
            k=10,
            layer={**LAYER, "role": "basis", "size_bytes": 360},
            provenance={"mask": mask.mask_digest},
            report_digest=report,
        ).id


def test_basis_job_is_accepted_with_its_payload(stocked: Api) -> None:
    mask_id, corpus_id = finished_mask(stocked), add_corpus(stocked)
    answer = stocked.post("/v1/bases", {"mask_id": mask_id, "corpus_id": corpus_id, "rank": 8})
    assert answer.status_code == 202
    job = answer.json()
    assert (job["kind"], answer.headers["location"]) == ("basis", f"/v1/jobs/{job['id']}")
    with stocked.service.database.write() as session:
        while (claim := claims.claim(session, worker="test", lease_s=60)) is not None:
            if claim.kind == "basis":
                break
    assert claim is not None
    expected = {"mask_id": mask_id, "corpus_id": corpus_id, "sequences": 256, "length": 128}
    assert claim.payload == {**expected, "rank": 8, "seed": 0}


def test_basis_is_listed_read_and_explained(stocked: Api) -> None:
    mask_id = finished_mask(stocked)
    basis_id = finished_basis(stocked, mask_id)
    record = stocked.get(f"/v1/bases/{basis_id}").json()
    assert (record["mask_id"], record["k"], record["options"]["rank"]) == (mask_id, 10, 32)
    assert stocked.get("/v1/bases", params={"mask_id": mask_id}).json()["items"] == [record]
    assert stocked.get("/v1/bases", params={"mask_id": f"mask_{NOBODY}"}).json()["items"] == []
    report = stocked.get(f"/v1/bases/{basis_id}/report")
    assert (report.status_code, report.json()) == (200, {"captured": []})
    assert stocked.get(f"/v1/bases/basis_{NOBODY}").status_code == 404


def test_corpus_of_a_basis_is_not_deleted(stocked: Api) -> None:
    basis_id = finished_basis(stocked, finished_mask(stocked))
    corpus_id = stocked.get(f"/v1/bases/{basis_id}").json()["corpus_id"]
    assert stocked.client.delete(f"/v1/corpora/{corpus_id}", headers=stocked.auth()).status_code == 409


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"mask_id": f"mask_{NOBODY}"}, 404),
        ({"corpus_id": f"corpus_{NOBODY}"}, 404),
        ({"rank": 257}, 422),
        ({"rank": 0}, 422),
        ({"sequences": 8, "rank": 8}, 409),
        ({"sequences": 16, "rank": 14}, 202),
    ],
)
def test_basis_that_cannot_be_learned_is_refused(stocked: Api, changes: dict[str, Any], status: int) -> None:
    body = {"mask_id": finished_mask(stocked), "corpus_id": add_corpus(stocked), **changes}
    assert stocked.post("/v1/bases", body).status_code == status
    preflight = stocked.post("/v1/preflights", {"kind": "basis", "request": body})
    assert preflight.status_code == (200 if status == 202 else status)


def test_build_takes_a_basis_and_exponents_of_fisher_masks_only(stocked: Api) -> None:
    model_id, corpus_id = add_model(stocked), add_corpus(stocked)
    fisher = {"method": "fisher", "corpus_id": corpus_id, "sequences": 8, "length": 32, "density": 0.01}
    build = {"model_id": model_id, "mask": fisher, "basis": {"corpus_id": corpus_id, "rank": 4}}
    answer = stocked.post("/v1/builds", {**build, "fisher_exponents": True})
    assert answer.status_code == 202
    assert stocked.get(f"/v1/builds/{answer.json()['id']}").json()["basis_id"] is None
    refused = {**build, "mask": MASK, "fisher_exponents": True}
    assert stocked.post("/v1/builds", refused).status_code == 409
    unknown = {**build, "basis": {"corpus_id": f"corpus_{NOBODY}"}}
    assert stocked.post("/v1/builds", unknown).status_code == 404
    too_many = {**build, "basis": {"corpus_id": corpus_id, "rank": 10, "sequences": 10}}
    assert stocked.post("/v1/builds", too_many).status_code == 409


def test_package_of_a_foreign_basis_or_of_exponents_without_scores_is_refused(stocked: Api) -> None:
    mask_id = finished_mask(stocked)
    other = finished_mask(stocked, digest=OTHER)
    basis_id = finished_basis(stocked, other)
    job_id = add_mask(stocked)["id"]
    with stocked.service.database.write() as session:
        mask = results.get_mask(session, tenant_id=stocked.tenant_id, mask_id=mask_id)
        quantization_id = results.add_quantization(
            session,
            tenant_id=stocked.tenant_id,
            job_id=job_id,
            model_id=mask.model_id,
            mask_id=None,
            evaluation_corpus_id=None,
            options={"scheme": "nf4", "group_size": 64, "evaluation_tokens": 256},
            dense_layer=LAYER,
            plain_layer=LAYER,
            provenance={},
            report_digest=DIGEST,
            picture_digest=DIGEST,
        ).id
    parts = {"mask_id": mask_id, "quantization_id": quantization_id}
    assert stocked.post("/v1/packages", {**parts, "basis_id": basis_id}).status_code == 409
    assert stocked.post("/v1/packages", {**parts, "fisher_exponents": True}).status_code == 409
    assert stocked.post("/v1/packages", {**parts, "basis_id": f"basis_{NOBODY}"}).status_code == 404
    assert (
        stocked.post("/v1/packages", {**parts, "basis_id": finished_basis(stocked, mask_id)}).status_code
        == 202
    )
