"""Tests of sparsification jobs on a tiny random model: registration, packages and refusals."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.choices import StreamedDataset
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.package.reader import Package, verify_package
from permille.schemas.inputs import StreamedCorpus
from permille.schemas.jobs import JobKind
from permille.store import artifacts, inputs, rows
from permille.store.errors import ConflictError
from permille.store.retention.collection import collect
from permille.store.tables import Artifact, Job, Model
from permille_sparsify.workers.task import _install
from tests.unit.workers.conftest import Bench

SPARSE = {"method": "wanda", "sequences": 6, "length": 32, "seed": 5, "evaluation_sequences": 4}


def request_of(bench: Bench, **changes: Any) -> dict[str, Any]:
    ids = {"model_id": bench.model.id, "corpus_id": bench.corpus.id}
    return {**SPARSE, **ids, "name": "tiny-sparse", **changes}


def made_by(bench: Bench, job: Job) -> tuple[Artifact, Model]:
    """Return the rows that a sparsification adds: its artifact and the model."""
    assert job.state == "succeeded", job.error
    with bench.db.read() as session:
        row = artifacts.get(
            session, tenant_id=bench.tenant_id, kind=JobKind.SPARSIFICATION, key=str(job.result_id)
        )
        model = rows.get(session, Model, tenant_id=bench.tenant_id, row_id=str(row.made_model_id))
    return row, model


def sparsified(bench: Bench, **changes: Any) -> tuple[Artifact, Model]:
    return made_by(bench, bench.finish(JobKind.SPARSIFICATION, request_of(bench, **changes)))


def folder_of(bench: Bench, row: Artifact) -> Path:
    return bench.root / "models" / "sparsified" / row.digest.removeprefix("sha256:")


def test_the_same_request_makes_the_same_model_and_a_report(bench: Bench) -> None:
    row, model = sparsified(bench, pattern="2:4", method="sparsegpt")
    again, other = sparsified(bench, pattern="2:4", method="sparsegpt", name="again")
    assert (again.digest, again.provenance) == (row.digest, row.provenance)
    assert [path.name for path in (bench.root / "models" / "sparsified").iterdir()] == [
        row.digest.removeprefix("sha256:")
    ]
    assert (model.name, other.name, model.id != other.id) == ("tiny-sparse", "again", True)
    assert model.source == {"kind": "sparsified", "sparsification_id": row.id}
    made = Checkpoint(folder_of(bench, row))
    assert made.digest() == row.digest == model.digest
    assert (model.parameter_count, row.size_bytes, row.model_id) == (
        made.parameters,
        made.size_bytes,
        bench.model.id,
    )
    report_blob = artifacts.blob_of(row, "report")
    assert report_blob is not None
    report = bench.report(report_blob.digest)
    assert (report["zeros"], report["pattern"]) == (0.5, "2:4")
    assert [layer["zeros"] for layer in report["layers"]] == [0.5, 0.5]
    assert all(0 < tensor["relative_error"] < 1 for tensor in report["tensors"])
    assert report["perplexity"]["tokens"] == 4 * 31 and report["perplexity"]["held_out"]
    assert report["perplexity"]["after"] != report["perplexity"]["before"]
    assert report["provenance"] == row.provenance
    assert report["provenance"]["model"]["location"] == "tiny"
    assert report["corpus"]["calibration"]["bad"]  # the corpus has a bad line, which is reported


def test_a_recovery_says_what_it_gained(bench: Bench) -> None:
    recovery = {"steps": 12, "rows": 2, "rank": 2, "learning_rate": 0.01}
    row, _ = sparsified(bench, rate=0.6, recovery=recovery)
    pruned, _ = sparsified(bench, rate=0.6, name="pruned")
    blobs = [artifacts.blob_of(each, "report") for each in (row, pruned)]
    report, plain = (bench.report(blob.digest) for blob in blobs if blob is not None)
    perplexity = report["perplexity"]
    assert plain["perplexity"]["pruned"] == plain["perplexity"]["after"]
    assert len({perplexity[name] for name in ("before", "pruned", "after")}) == 3
    assert row.digest != pruned.digest
    assert row.provenance["recovery"] == {**recovery, "learning_rate": "0.01"}
    assert pruned.provenance["recovery"] is None
    made = Checkpoint(folder_of(bench, row))
    zeros = [float((made.float32(name) == 0).mean()) for name, _ in scoped_tensors(made.config)]
    assert np.mean(zeros) == pytest.approx(0.6, abs=0.02)


def test_a_package_of_a_sparse_model_says_what_it_is_made_of(bench: Bench) -> None:
    row, model = sparsified(bench)
    mask = {"method": "magnitude", "density": 0.01}
    build = bench.finish(JobKind.BUILD, {"model_id": model.id, "mask": mask})
    assert build.state == "succeeded", build.error
    assert verify_package(bench.blobs, str(build.result_id)).k
    package = Package.open(bench.blobs, str(build.result_id))
    for part in ("mask", "quantization"):
        known: Any = package.manifest.provenance[part]
        assert known["model"] == {"kind": "sparsified", "made_of": row.provenance, "digest": row.digest}
    assert np.count_nonzero(package.values()) == len(package.values()), "only weights that were kept"
    names = [name for name, _ in scoped_tensors(model.config or {})]
    source = Checkpoint(folder_of(bench, row))
    assert all((source.float32(name) == 0).mean() == 0.5 for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0.5}, "has these zeros already"),
        ({"rate": 0.4, "method": "magnitude"}, "has these zeros already"),
        ({"length": 8000, "sequences": 4096}, "The corpus has"),
        ({"corpus_id": "corpus_" + "0" * 26}, "no corpus"),
    ],
)
def test_what_cannot_be_made_sparse_fails_with_the_reason(
    bench: Bench, changes: dict[str, Any], message: str
) -> None:
    _, model = sparsified(bench)
    job = bench.finish(JobKind.SPARSIFICATION, request_of(bench, model_id=model.id, name="more", **changes))
    assert job.state == "failed" and message in str(job.error)
    assert len(list((bench.root / "models" / "sparsified").iterdir())) == 1


def test_a_name_that_was_taken_meanwhile_registers_nothing(bench: Bench) -> None:
    job = bench.finish(JobKind.SPARSIFICATION, request_of(bench, name="tiny"))
    assert job.state == "failed" and "There is a model 'tiny' already" in str(job.error)
    with bench.db.read() as session:
        assert not artifacts.list_artifacts(
            session, tenant_id=bench.tenant_id, kind=JobKind.SPARSIFICATION
        ).items


def test_a_model_that_an_earlier_attempt_made_is_installed_as_a_new_one(tmp_path: Path) -> None:
    made, final = tmp_path / "made", tmp_path / "sparsified" / "0123"
    made.mkdir()
    (made / "config.json").write_text("{}")
    os.utime(made, (1e9, 1e9))
    _install(made, final, mark="job_1")
    assert final.stat().st_mtime > 1.5e9, "or a collection would delete it before a row names it"


def test_a_sparse_model_can_be_removed_and_its_source_cannot(bench: Bench) -> None:
    row, model = sparsified(bench)
    with bench.db.write() as session:
        with pytest.raises(ConflictError, match=f"was made from {bench.model.id}"):
            inputs.remove(session, Model, tenant_id=bench.tenant_id, row_id=bench.model.id)
        made: dict[str, Any] = {"tenant_id": bench.tenant_id, "kind": JobKind.SPARSIFICATION, "key": row.id}
        with pytest.raises(ConflictError, match=f"{row.id} is needed by {model.id}"):
            artifacts.remove(session, **made)
        inputs.remove(session, Model, tenant_id=bench.tenant_id, row_id=model.id)
        assert artifacts.get(session, **made).made_model_id is None
        artifacts.remove(session, **made)
        inputs.remove(session, Model, tenant_id=bench.tenant_id, row_id=bench.model.id)
    # Collect even blobs that were just stored.
    old = bench.settings.model_copy(update={"collection_grace_s": -60.0})
    removed = collect(bench.db, bench.blobs, old).removed
    assert removed.keys() == {inputs.sparsified_path(row.digest), *(blob.digest for blob in row.blobs)}
    assert not folder_of(bench, row).exists()


def test_a_job_whose_corpus_cannot_be_reached_opens_no_model(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with bench.db.write() as session:
        source = StreamedCorpus(kind="streamed", dataset=StreamedDataset.C4)
        corpus = inputs.add_corpus(session, tenant_id=bench.tenant_id, name="c4", source=source)
    job = bench.finish(JobKind.SPARSIFICATION, request_of(bench, corpus_id=corpus.id))
    assert job.error is not None and "Cannot reach the hub for c4" in str(job.error["message"])
    assert job.message == "reaching the corpus"
    with bench.db.read() as session:
        row = rows.get(session, Model, tenant_id=bench.tenant_id, row_id=bench.model.id)
    assert row.digest is None, "the job has opened the model"
