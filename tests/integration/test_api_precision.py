"""Measured precision over the API: asked for, refused where there is no text, shown."""

from typing import Any

import pytest

from permille.package.reader import Package
from permille.package.writer import add_measurements
from permille.store import claims, results
from permille.store.results import LayerRecord
from tests.api_service import Api
from tests.integration.test_api_bases import DIGEST, LAYER, NOBODY, finished_mask
from tests.integration.test_api_jobs import MASK, add_corpus, add_mask, add_model, stocked

__all__ = ["stocked"]

ROW = {
    "engine": "torch",
    "version": "torch 2",
    "compute_dtype": "float32",
    "epsilon": 0.01,
    "relative_error": 0.002,
    "cosine": 1.0,
    "bfloat16_cosine": 0.4,
    "directions": 32,
    "tokens": 124,
}


def payload_of(api: Api, kind: str) -> dict[str, Any]:
    with api.service.database.write() as session:
        while (claim := claims.claim(session, worker="test", lease_s=60)) is not None:
            if claim.kind == kind:
                return dict(claim.payload)
    raise LookupError(f"expected a queued job of kind {kind}, got none")


def finished_parts(api: Api) -> dict[str, str]:
    """A random mask, which has no corpus, and a quantization."""
    mask_id, job_id = finished_mask(api), add_mask(api)["id"]
    with api.service.database.write() as session:
        mask = results.get_mask(session, tenant_id=api.tenant_id, mask_id=mask_id)
        quantization = results.add_quantization(
            session,
            tenant_id=api.tenant_id,
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
        )
    return {"mask_id": mask_id, "quantization_id": quantization.id}


def measured_package(api: Api, measurements: dict[str, Any]) -> str:
    """A package of the tenant that carries them."""
    package = api.package()
    measured = Package.open(package.blobs, add_measurements(package, measurements))
    with api.service.database.write() as session:
        results.add_package(
            session,
            tenant_id=api.tenant_id,
            job_id=None,
            model_id=None,
            mask_id=None,
            quantization_id=None,
            digest=measured.digest,
            manifest=measured.manifest.to_bytes(),
            k=measured.k,
            layers=[
                LayerRecord(
                    role=layer.role,
                    media_type=layer.media_type,
                    digest=layer.digest,
                    size_bytes=layer.size_bytes,
                )
                for layer in measured.manifest.layers
            ],
        )
    return measured.digest


def test_package_of_a_mask_without_texts_is_measured_on_the_corpus_that_is_named(stocked: Api) -> None:
    parts, corpus_id = finished_parts(stocked), add_corpus(stocked)
    refused = stocked.post("/v1/packages", {**parts, "measure_precision": True})
    assert refused.status_code == 409
    assert "precision_corpus_id" in refused.json()["detail"]
    alone = stocked.post("/v1/packages", {**parts, "precision_corpus_id": corpus_id})
    assert (alone.status_code, "measure_precision" in alone.json()["detail"]) == (409, True)
    measure = {**parts, "measure_precision": True}
    unknown = stocked.post("/v1/packages", {**measure, "precision_corpus_id": f"corpus_{NOBODY}"})
    assert unknown.status_code == 404
    answer = stocked.post("/v1/packages", {**measure, "precision_corpus_id": corpus_id})
    assert answer.status_code == 202
    payload = payload_of(stocked, "package")
    assert (payload["measure_precision"], payload["precision_corpus_id"]) == (True, corpus_id)


def test_build_measures_on_the_corpus_of_its_mask_or_on_one_that_is_named(stocked: Api) -> None:
    model_id, corpus_id = add_model(stocked), add_corpus(stocked)
    fisher = {"method": "fisher", "corpus_id": corpus_id, "sequences": 8, "length": 32, "density": 0.01}
    build = {"model_id": model_id, "measure_precision": True}
    assert stocked.post("/v1/builds", {**build, "mask": fisher}).status_code == 202
    assert stocked.post("/v1/builds", {**build, "mask": MASK}).status_code == 409
    named = {**build, "mask": MASK, "precision_corpus_id": corpus_id}
    assert stocked.post("/v1/builds", named).status_code == 202
    foreign = {**named, "precision_corpus_id": f"corpus_{NOBODY}"}
    assert stocked.post("/v1/builds", foreign).status_code == 404


def test_preflight_counts_what_measuring_takes(stocked: Api) -> None:
    build = {"model_id": add_model(stocked), "mask": MASK, "precision_corpus_id": add_corpus(stocked)}
    figures = []
    for changes in ({"precision_corpus_id": None}, {"measure_precision": True}):
        request = {"kind": "build", "request": {**build, **changes}}
        answer = stocked.post("/v1/preflights", request).json()
        figures.append({figure["name"]: figure["needed"] for figure in answer["figures"]})
    without, measured = figures
    assert {name for name in without if measured[name] > without[name]} >= {"disk"}


def test_report_of_a_package_shows_the_rows_and_where_a_device_begins(stocked: Api) -> None:
    rows = [ROW, {**ROW, "epsilon": 0.1, "relative_error": None}, {**ROW, "epsilon": "wide"}]
    digest = measured_package(stocked, {"precision": rows})
    report = stocked.get(f"/v1/packages/{digest}/report")
    assert report.status_code == 200
    assert report.json() == {"digest": digest, "precision": rows[:2], "best_epsilon": 0.01}


def test_report_of_a_package_that_nothing_was_measured_of_is_empty(stocked: Api) -> None:
    digest = stocked.package().digest
    report = stocked.get(f"/v1/packages/{digest}/report").json()
    assert report == {"digest": digest, "precision": [], "best_epsilon": None}
    assert stocked.get(f"/v1/packages/{DIGEST}/report").status_code == 404


@pytest.mark.parametrize(
    "measurements",
    [
        {"precision": [{**ROW, "epsilon": 10**400}]},
        {"precision": "no"},
        {"other": [1]},
        {"precision": [[[]]]},
    ],
)
def test_report_passes_over_measurements_of_another_form(stocked: Api, measurements: dict[str, Any]) -> None:
    digest = measured_package(stocked, measurements)
    assert stocked.get(f"/v1/packages/{digest}/report").json()["precision"] == []


def test_lost_measurements_are_unavailable(stocked: Api) -> None:
    digest = measured_package(stocked, {"precision": [ROW]})
    layers = stocked.get(f"/v1/packages/{digest}").json()["layers"]
    stocked.service.blobs.delete(
        next(layer["digest"] for layer in layers if layer["path"] == "measurements.json")
    )
    assert stocked.get(f"/v1/packages/{digest}/report").status_code == 503


def test_document_has_examples_of_request_and_report(stocked: Api) -> None:
    document = stocked.client.get("/openapi.json").json()
    content = document["paths"]["/v1/packages"]["post"]["requestBody"]["content"]["application/json"]
    assert content["examples"]["precision"]["value"]["measure_precision"] is True
    fields = document["components"]["schemas"]["MeasuredPrecision"]["properties"]
    assert fields["epsilon"]["examples"] == [0.000477]
