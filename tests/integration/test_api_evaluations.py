"""Evaluations over the API: asked for, followed, read back, refused where they do not fit."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from permille.store import claims, evaluations
from permille.store.evaluations import Findings
from permille.store.settings import StoreSettings
from permille.store.tables import Role
from permille_workers.child import attempt
from permille_workers.settings import WorkerSettings
from permille_workers.tasks import TASKS
from tests.api_service import Api
from tests.integration.test_api_jobs import add_corpus, add_model, stocked
from tests.tiny_model import write_sst2

__all__ = ["stocked"]

EXAMPLE_MODEL = Path(__file__).resolve().parents[2] / "examples" / "model"
NOBODY = "01jd3kq8z7m4n5p6r7s8t9v0wx"
LINES = b'{"kind":"sweep","key":"sha256:0"}\n{"kind":"cell","key":"tiny/nf4/zero-shot/sst2/0"}\n'
TABLES = "## tiny, nf4 ±\n".encode()


def body_of(api: Api, **changes: Any) -> dict[str, Any]:
    write_sst2(api.service.settings.corpus_root / "sst2" / "train.tsv")
    return {
        "model_ids": [add_model(api)],
        "corpus_id": add_corpus(api),
        "tasks": {"sst2": {"train": "sst2/train.tsv"}},
        "methods": ["zero-shot", "zo:sensitive-c4"],
        "bases": ["nf4"],
        "seeds": [0],
        "max_tokens": 128,
        **changes,
    }


def finished_evaluation(api: Api, **changes: Any) -> dict[str, Any]:
    """An evaluation as a worker would write it: its record."""
    body = body_of(api, **changes)
    job = api.post("/v1/evaluations", body).json()
    with api.service.database.write() as session:
        row = evaluations.add(
            session,
            tenant_id=api.tenant_id,
            job_id=job["id"],
            model_ids=body["model_ids"],
            corpus_id=body["corpus_id"],
            options={name: body[name] for name in ("tasks", "methods", "bases", "seeds")},
            provenance={},
            findings=Findings(
                cells=2,
                bad_rows=1,
                failed_cells=3,
                results_digest=api.service.blobs.put_bytes(LINES),
                report_digest=api.service.blobs.put_bytes(TABLES),
                size_bytes=len(LINES),
            ),
        )
    record: dict[str, Any] = api.get(f"/v1/evaluations/{row.id}").json()
    return record


def test_evaluation_job_is_accepted_with_its_payload_and_only_once(stocked: Api) -> None:
    body = body_of(stocked)
    answer = stocked.post("/v1/evaluations", body, key="once")
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert (job["kind"], answer.headers["location"]) == ("evaluation", f"/v1/jobs/{job['id']}")
    assert stocked.post("/v1/evaluations", body, key="once").json()["id"] == job["id"]
    other = stocked.post("/v1/evaluations", {**body, "seeds": [1]}, key="once")
    assert (other.status_code, other.json()["type"].rpartition("/")[2]) == (409, "idempotency-conflict")
    with stocked.service.database.write() as session:
        claim = claims.claim(session, worker="test", lease_s=60)
    assert claim is not None
    assert claim.payload["tasks"] == {"sst2": {"train": "sst2/train.tsv", "test": None}}
    assert (claim.payload["zo_steps"], claim.payload["sizes"]) == (1000, [1000, 500, 1000])
    assert stocked.post(f"/v1/jobs/{job['id']}/cancel").json()["cancel_requested"] is True


def test_evaluation_is_listed_and_read_with_results_and_tables(stocked: Api) -> None:
    record = finished_evaluation(stocked)
    assert (record["cells"], record["failed_cells"], record["bad_rows"]) == (2, 3, 1)
    assert record["size_bytes"] == len(LINES)
    assert record["options"]["tasks"] == {"sst2": {"train": "sst2/train.tsv", "test": None}}
    (model_id,) = record["model_ids"]
    assert stocked.get("/v1/evaluations").json()["items"] == [record]
    assert stocked.get("/v1/evaluations", params={"model_id": model_id}).json()["items"] == [record]
    other = {"model_id": f"model_{NOBODY}"}
    assert stocked.get("/v1/evaluations", params=other).json()["items"] == []
    results = stocked.get(f"/v1/evaluations/{record['id']}/results")
    assert (results.content, results.headers["content-type"]) == (LINES, "application/x-ndjson")
    assert results.headers["etag"] == f'"{record["digest"]}"'
    again = {"If-None-Match": results.headers["etag"]}
    assert stocked.get(f"/v1/evaluations/{record['id']}/results", headers=again).status_code == 304
    part = stocked.get(f"/v1/evaluations/{record['id']}/results", headers={"Range": "bytes=0-5"})
    assert (part.status_code, part.content) == (206, LINES[:6])
    report = stocked.get(f"/v1/evaluations/{record['id']}/report")
    assert (report.text, report.headers["content-type"]) == (TABLES.decode(), "text/markdown; charset=utf-8")


FREE_TEXT = {
    "tasks": {"squad": {"train": "squad/train.json"}},
    "methods": ["zero-shot", "icl:1"],
    "bases": ["float32"],
    "sizes": [4, 2, 3],
    "max_tokens": 128,
}
REFERENCES = ("a red house", "and was in it to of her")  # words that any model of English writes


def write_squad(path: Path) -> None:
    """A SQuAD file of 24 questions, and one that has no answer."""
    paragraphs = [
        {
            "context": f"House {number} is red.",
            "qas": [
                {
                    "id": f"q{number}",
                    "question": f"What is number {number}?",
                    "answers": [{"text": text} for text in REFERENCES if number != 24],
                }
            ],
        }
        for number in range(25)
    ]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"data": [{"title": "Towns", "paragraphs": paragraphs}]}))


def shared_words(written: str, answer: str) -> float:
    """F1 of the words of two texts, articles and punctuation aside."""
    found, expected = (
        Counter(re.sub(r"[^\w\s]", "", word) for word in text.lower().split()) for text in (written, answer)
    )
    for words in (found, expected):
        for other in ("", "a", "an", "the"):
            del words[other]
    both = (found & expected).total()
    return 2 * both / (found.total() + expected.total()) if both else 0.0


def test_free_text_is_asked_for_written_and_read_back(stocked: Api) -> None:
    settings = stocked.service.settings
    write_squad(settings.corpus_root / "squad" / "train.json")
    shutil.copytree(EXAMPLE_MODEL, settings.model_root / "example")
    folder = {"name": "example", "source": {"kind": "folder", "path": "example"}}
    model_id = stocked.post("/v1/models", folder).json()["id"]
    job = stocked.post("/v1/evaluations", body_of(stocked, model_ids=[model_id], **FREE_TEXT)).json()
    worker = WorkerSettings(
        **{name: getattr(settings, name) for name in StoreSettings.model_fields if name != "data_dir"}
    )
    with stocked.service.database.write() as session:
        claim = claims.claim(session, worker="test", lease_s=600)
    assert claim is not None and claim.job_id == job["id"]
    attempt(TASKS, stocked.service.database, claim, worker)

    ended = stocked.get(f"/v1/jobs/{job['id']}").json()
    assert ended["state"] == "succeeded", ended["error"]
    record = stocked.get(ended["result"]).json()
    assert (record["cells"], record["bad_rows"]) == (2, 1)
    assert record["options"]["tasks"] == {"squad": {"train": "squad/train.json", "test": None}}
    lines = [json.loads(line) for line in stocked.get(f"{ended['result']}/results").text.splitlines()]
    cells = [line for line in lines if line["kind"] == "cell"]
    assert [cell["method"] for cell in cells] == FREE_TEXT["methods"]
    for cell in cells:
        assert len(cell["written"]) == 3
        expected = [max(shared_words(text, answer) for answer in REFERENCES) for text in cell["written"]]
        assert cell["item_f1"] == pytest.approx(expected, abs=1e-4)
        assert cell["f1"] == pytest.approx(sum(expected) / 3, abs=1e-4)
    assert [cell["shots"] for cell in cells] == [0, 1]
    assert any(cell["f1"] > 0 for cell in cells)
    assert ", F1 " in stocked.get(f"{ended['result']}/report").text


def test_results_of_an_evaluation_that_runs_do_not_exist(stocked: Api) -> None:
    job = stocked.post("/v1/evaluations", body_of(stocked)).json()
    with stocked.service.database.write() as session:
        claim = claims.claim(session, worker="test", lease_s=60)
        assert claim is not None
        claims.report_progress(
            session, claim, fraction=0.5, message="cell 2/2 tiny/nf4/zo:random/sst2/0", eta_s=60.0
        )
    found = stocked.get(f"/v1/jobs/{job['id']}").json()
    assert found["progress"]["message"] == "cell 2/2 tiny/nf4/zo:random/sst2/0"
    assert (found["progress"]["fraction"], found["result"]) == (0.5, None)
    assert stocked.get("/v1/evaluations").json()["items"] == []
    for part in ("", "/results", "/report"):
        assert stocked.get(f"/v1/evaluations/{job['id']}{part}").status_code == 404
        assert stocked.get(f"/v1/evaluations/eval_{NOBODY}{part}").status_code == 404


def test_results_whose_blob_is_gone_are_not_found(stocked: Api) -> None:
    record = finished_evaluation(stocked)
    stocked.service.blobs.delete(record["digest"])
    assert stocked.get(f"/v1/evaluations/{record['id']}/results").status_code == 404
    assert stocked.get(f"/v1/evaluations/{record['id']}/report").status_code == 200


def test_another_tenant_neither_reads_nor_uses(stocked: Api) -> None:
    record = finished_evaluation(stocked)
    stranger = stocked.operator(Role.ADMIN, tenant="stranger")
    for part in ("", "/results", "/report"):
        assert stocked.get(f"/v1/evaluations/{record['id']}{part}", stranger).status_code == 404
    assert stocked.get("/v1/evaluations", stranger).json()["items"] == []
    own = {"name": "own", "source": {"kind": "file", "path": "texts.jsonl"}}
    corpus_id = stocked.post("/v1/corpora", own, stranger).json()["id"]
    folder = {"name": "own", "source": {"kind": "folder", "path": "tiny"}}
    model_id = stocked.post("/v1/models", folder, stranger).json()["id"]
    body = body_of(stocked)
    mine = {**body, "model_ids": [model_id], "corpus_id": corpus_id}
    assert stocked.post("/v1/evaluations", mine, stranger).status_code == 202
    assert (
        stocked.post("/v1/evaluations", {**mine, "corpus_id": body["corpus_id"]}, stranger).status_code == 404
    )
    foreign = {**mine, "model_ids": [model_id, *body["model_ids"]]}
    assert stocked.post("/v1/evaluations", foreign, stranger).status_code == 404


def test_what_an_evaluation_was_made_of_is_not_deleted(stocked: Api) -> None:
    record = finished_evaluation(stocked)
    assert stocked.delete(f"/v1/corpora/{record['corpus_id']}").status_code == 409
    assert stocked.delete(f"/v1/models/{record['model_ids'][0]}").status_code == 409


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"model_ids": [f"model_{NOBODY}"]}, 404),
        ({"model_ids": []}, 422),
        ({"model_ids": [f"model_{NOBODY}"] * 2}, 422),
        ({"model_ids": ["../tiny"]}, 422),
        ({"corpus_id": f"corpus_{NOBODY}"}, 404),
        ({"corpus_id": "texts.jsonl"}, 422),
        ({"tasks": {}}, 422),
        ({"tasks": {"glue": {"train": "sst2/train.tsv"}}}, 422),
        ({"tasks": {"squad": {"train": "sst2/train.tsv"}}}, 409),
        ({"tasks": {"sst2": {"train": "../secret.tsv"}}}, 422),
        ({"tasks": {"sst2": {"train": "/etc/passwd"}}}, 422),
        ({"tasks": {"sst2": {"train": "sst2/absent.tsv"}}}, 404),
        ({"tasks": {"sst2": {"train": "sst2/train.tsv", "test": "sst2/absent.tsv"}}}, 404),
        ({"tasks": {"sst2": {"train": "sst2"}}}, 409),
        ({"tasks": {"rte": {"train": "sst2/train.tsv"}}}, 409),
        ({"tasks": {"sst2": {"train": "sst2/train.tsv", "valid": "sst2/train.tsv"}}}, 422),
        ({"methods": ["zo:everything"]}, 422),
        ({"methods": ["icl:0"]}, 422),
        ({"methods": ["zero-shot", "zero-shot"]}, 422),
        ({"bases": ["nf3"]}, 422),
        ({"seeds": [1_000_000]}, 422),
        ({"trials": 2}, 422),
        ({"tuning_seeds": 2}, 422),
        ({"zo_steps": 0}, 422),
        ({"zo_steps": 10**12}, 422),
        ({"sizes": [1000, 500]}, 422),
        ({"sizes": [2**53, 1, 1]}, 422),
        ({"max_tokens": 10**9}, 422),
        ({"density": 0.9}, 422),
        ({"estimator": "split"}, 422),
        ({"surprise": 1}, 422),
        (
            {
                "methods": [f"icl:{n}" for n in range(1, 65)],
                "seeds": list(range(32)),
                "bases": ["nf4", "bf16"],
            },
            202,
        ),
        (
            {
                "methods": [f"icl:{n}" for n in range(1, 65)],
                "seeds": list(range(32)),
                "bases": ["nf4", "bf16", "float32"],
            },
            409,
        ),
    ],
)
def test_evaluation_that_cannot_be_is_refused(stocked: Api, changes: dict[str, Any], status: int) -> None:
    body = body_of(stocked, **changes)
    answer = stocked.post("/v1/evaluations", body)
    assert answer.status_code == status, answer.text
    preflight = stocked.post("/v1/preflights", {"kind": "evaluation", "request": body})
    assert preflight.status_code == (200 if status == 202 else status)
    assert len(stocked.get("/v1/jobs").json()["items"]) == (status == 202)


def test_rows_longer_than_a_models_positions_are_refused(stocked: Api) -> None:
    for body in (body_of(stocked, max_tokens=129), body_of(stocked, corpus_tokens=129)):
        answer = stocked.post("/v1/evaluations", body)
        assert answer.status_code == 409
        assert "_tokens of at most the 128 positions of model_" in answer.json()["detail"]
    # Where nothing takes gradients of the corpus, its length does not matter.
    body = body_of(stocked, corpus_tokens=129, methods=["zero-shot"])
    assert stocked.post("/v1/evaluations", body).status_code == 202


def test_task_files_outside_of_the_root_are_refused(stocked: Api, tmp_path: Path) -> None:
    root = stocked.service.settings.corpus_root
    secret = write_sst2(tmp_path / "secret" / "train.tsv")
    (root / "link.tsv").symlink_to(secret)
    (root / "folder").symlink_to(secret.parent)
    for path in ("link.tsv", "folder/train.tsv"):
        answer = stocked.post("/v1/evaluations", body_of(stocked, tasks={"sst2": {"train": path}}))
        assert answer.status_code == 409, path
        assert "leads out of it" in answer.json()["detail"]
        assert str(tmp_path) not in answer.text


def test_streamed_corpus_is_refused(stocked: Api) -> None:
    streamed = {"name": "c4", "source": {"kind": "streamed", "dataset": "c4"}}
    corpus_id = stocked.post("/v1/corpora", streamed).json()["id"]
    answer = stocked.post("/v1/evaluations", body_of(stocked, corpus_id=corpus_id))
    assert (answer.status_code, "which is streamed" in answer.json()["detail"]) == (409, True)


def test_evaluation_that_would_take_for_ever_is_refused_with_figures(stocked: Api) -> None:
    body = body_of(
        stocked,
        methods=["zo:full", "fo:full"],
        seeds=list(range(32)),
        zo_steps=100_000,
        fo_steps=100_000,
        queries=64,
        batch_size=256,
    )
    answer = stocked.post("/v1/evaluations", body)
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (409, "preflight-refused")
    assert not next(one for one in answer.json()["figures"] if one["name"] == "time")["enough"]


def test_a_task_file_without_an_end_is_not_read_whole(stocked: Api) -> None:
    path = stocked.service.settings.corpus_root / "huge.tsv"
    with path.open("wb") as file:
        file.truncate(1 << 34)  # sparse: nothing is on the disk
    answer = stocked.post("/v1/evaluations", body_of(stocked, tasks={"sst2": {"train": "huge.tsv"}}))
    assert answer.status_code == 409, answer.text
    figure = next(one for one in answer.json()["figures"] if one["name"] == "memory")
    assert (figure["enough"], figure["needed"] > 1 << 34) == (False, True)


def test_the_document_shows_requests_that_are_accepted(stocked: Api) -> None:
    document = stocked.get("/openapi.json").json()
    operation = document["paths"]["/v1/evaluations"]["post"]
    examples = operation["requestBody"]["content"]["application/json"]["examples"]
    root = stocked.service.settings.corpus_root
    write_sst2(root / "SST-2" / "train.tsv")
    write_sst2(root / "SST-2" / "dev.tsv")
    (root / "BoolQ").mkdir()
    row = {"passage": "a b", "question": "c", "label": True}
    (root / "BoolQ" / "val.jsonl").write_text(json.dumps(row))
    ids = {"model_ids": [add_model(stocked)], "corpus_id": add_corpus(stocked)}
    for name, example in examples.items():
        # The model here has 128 positions; those that the examples are for have 512 and more.
        answer = stocked.post("/v1/evaluations", {**example["value"], **ids, "max_tokens": 128})
        assert answer.status_code == 202, (name, answer.text)
    assert {"202", "404", "409", "422"} <= operation["responses"].keys()
