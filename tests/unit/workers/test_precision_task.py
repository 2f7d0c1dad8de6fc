"""Packages that say how far projected gradients are from the exact ones, on a tiny random model."""

import math
from typing import Any

import pytest

from permille.package.limits import MEASUREMENTS
from permille.package.measurements import best_epsilon, precision_rows
from permille.package.reader import Package, verify_package
from permille.store import claims, results
from permille.store.tables import PackageRow
from permille_workers.context import JobCancelledError, TaskContext
from permille_workers.tasks import TASKS
from permille_workers.work_folders import locked_work_folder
from tests.unit.workers.conftest import Bench
from tests.unit.workers.test_tasks import (
    build_payload,
    failed,
    mask_of,
    package_of,
    quantization_of,
)

NO_TEXTS = {"method": "random", "corpus_id": None, "sequences": None, "length": None}


def parts_of(bench: Bench, **options: Any) -> dict[str, Any]:
    return {"mask_id": mask_of(bench, **options).id, "quantization_id": quantization_of(bench).id}


def made(bench: Bench, payload: dict[str, Any]) -> PackageRow:
    return package_of(bench, bench.finish("package", payload))


def test_a_package_says_what_its_gradients_are_worth_and_is_else_the_same(bench: Bench) -> None:
    parts = parts_of(bench)
    bare = Package.open(bench.blobs, made(bench, parts).digest)
    row = made(bench, {**parts, "measure_precision": True})
    verify_package(bench.blobs, row.digest)
    package = Package.open(bench.blobs, row.digest)
    rows = precision_rows(package.measurements())
    assert [(found.engine, found.compute_dtype) for found in rows] == [
        ("torch", dtype) for dtype in ("float32", "bfloat16") for _ in range(4)
    ]
    assert all("torch" in found.version and found.directions == 32 for found in rows)
    assert {found.tokens for found in rows} == {4 * 31}
    norms = [found.epsilon * math.sqrt(package.k) for found in rows[:4]]
    assert norms == pytest.approx([1 / 32, 1 / 8, 1 / 2, 2], rel=1e-3)
    errors = {(found.compute_dtype, index % 4): found.relative_error for index, found in enumerate(rows)}
    assert min(errors["float32", index] or 0 for index in range(4)) < 0.05
    assert (errors["bfloat16", 0] or 9) > 10 * (errors["float32", 0] or 9)
    assert best_epsilon(rows) in [found.epsilon for found in rows[:4]]

    assert bare.measurements() is None
    assert package.manifest.provenance == bare.manifest.provenance
    files = {layer.path for layer in package.manifest.layers}
    assert [layer for layer in package.manifest.layers if layer.path != MEASUREMENTS] == list(
        bare.manifest.layers
    )
    assert MEASUREMENTS in files
    assert row.manifest == package.manifest.to_bytes()
    with bench.db.read() as session:
        served = {blob.digest for blob in results.list_package_blobs(session, package=row)}
    assert package.manifest.files()[MEASUREMENTS].digest in served


def test_a_build_measures_on_the_texts_of_its_mask(bench: Bench) -> None:
    payload = build_payload(bench, measure_precision=True, evaluation_corpus_id=None)
    row = package_of(bench, bench.finish("build", payload))
    assert len(precision_rows(Package.open(bench.blobs, row.digest).measurements())) == 8


def test_the_same_parts_measured_twice_are_the_same_package(bench: Bench) -> None:
    payload = {**parts_of(bench), "measure_precision": True}
    assert made(bench, payload).digest == made(bench, payload).digest


def test_a_mask_without_texts_needs_a_corpus(bench: Bench) -> None:
    payload = {**parts_of(bench, **NO_TEXTS), "measure_precision": True}
    assert "a corpus to measure the precision on" in failed(bench, "package", payload)
    row = made(bench, {**payload, "precision_corpus_id": bench.corpus.id})
    assert precision_rows(Package.open(bench.blobs, row.digest).measurements())


def test_a_corpus_of_too_few_texts_is_refused(bench: Bench) -> None:
    payload = {**parts_of(bench), "measure_precision": True}
    (bench.root / "corpora" / "rows.jsonl").write_text('{"text": "a few words"}\n')
    assert "expected 4 sequences of 32 tokens" in failed(bench, "package", payload)


def test_a_cancelled_measurement_ends_at_once_and_leaves_nothing(bench: Bench) -> None:
    bench.submit("package", {**parts_of(bench), "measure_precision": True})
    told: list[float] = []

    def progress(fraction: float, message: str) -> None:
        told.append(fraction)
        if message.startswith("bfloat16 difference 8/"):
            raise JobCancelledError(message)

    with bench.db.write() as session:
        claim = claims.claim(session, worker="bench", lease_s=600)
    assert claim is not None
    with locked_work_folder(bench.settings.work_root, claim.job_id) as folder:
        context = TaskContext(
            claim=claim,
            db=bench.db,
            blobs=bench.blobs,
            settings=bench.settings,
            work_folder=folder,
            progress=progress,
        )
        with pytest.raises(JobCancelledError):
            TASKS["package"](context)
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert told == sorted(told)
    assert 0.5 < told[-1] < 0.9
