"""Sparsifications over the API."""

from pathlib import Path
from typing import Any

from tests.api_service import Api
from tests.integration.test_api_jobs import add_model, stocked
from tests.packages import TINY_LLAMA
from tests.tiny_model import write_model

__all__ = ["stocked"]


def test_sparsifications_that_cannot_be_are_refused_before_they_begin(stocked: Api, tmp_path: Path) -> None:
    model_id = add_model(stocked)
    corpus = {"name": "streamed", "source": {"kind": "streamed", "dataset": "c4"}}
    corpus_id = stocked.post("/v1/corpora", corpus).json()["id"]
    body = {"model_id": model_id, "corpus_id": corpus_id, "name": "sparse"}
    refused: dict[str, tuple[dict[str, Any], int, str]] = {
        "a rate of 1": ({"rate": 1}, 422, "less than 1"),
        "a rate of 0": ({"rate": 0}, 422, "greater than 0"),
        "a rate above the pattern's": ({"rate": 0.6, "pattern": "2:4"}, 409, "at most 0.5 with 2:4, not 0.6"),
        "no step": ({"recovery": {"steps": 0}}, 422, "greater than or equal to 1"),
        "another pattern": ({"pattern": "3:4"}, 422, "2:4"),
        "another method": ({"method": "random"}, 422, "wanda"),
        "a name that is taken": ({"name": "tiny"}, 409, "There is a model 'tiny' already"),
        "no such model": ({"model_id": "model_" + "0" * 26}, 404, "no model"),
        "no such corpus": ({"corpus_id": "corpus_" + "0" * 26}, 404, "no corpus"),
    }
    for name, (changes, status, said) in refused.items():
        answer = stocked.post("/v1/sparsifications", body | changes)
        assert (answer.status_code, said in answer.text) == (status, True), (name, answer.text)
    assert stocked.get("/v1/jobs").json()["items"] == []
    asked = stocked.post("/v1/preflights", {"kind": "sparsification", "request": body})
    assert asked.json()["accepted"] and all(figure["needed"] > 0 for figure in asked.json()["figures"])
    job = stocked.post("/v1/sparsifications", body | {"pattern": "2:4", "method": "sparsegpt"}).json()
    assert (job["kind"], job["state"]) == ("sparsification", "queued")
    write_model(tmp_path / "models" / "narrow", config=TINY_LLAMA | {"intermediate_size": 60})
    narrow = {"name": "narrow", "source": {"kind": "folder", "path": "narrow"}}
    changes = {"model_id": stocked.post("/v1/models", narrow).json()["id"], "pattern": "4:8"}
    answer = stocked.post("/v1/sparsifications", body | changes)
    assert (answer.status_code, "groups of 8 do not divide its rows of 60" in answer.text) == (409, True)
