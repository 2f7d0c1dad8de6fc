"""Tests of jobs with a model from a GGUF file: the package keeps the file's codes."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from permille.engines.gguf.export import export_gguf
from permille.models.gguf.file import GgufFile
from permille.package.reader import verify_package
from permille.quantization.gguf_blocks import TYPES
from permille.quantization.types import Scheme
from permille.schemas.inputs import GgufModel
from permille.schemas.jobs import JobKind
from permille.store import inputs
from tests.unit.models.gguf_files import coded_file
from tests.unit.workers.conftest import Bench
from tests.unit.workers.jobs import build_request, digest_of_role, made_by, part_of


def with_file(bench: Bench, folder: Path, kinds: tuple[str, ...]) -> tuple[Bench, Path]:
    path = coded_file(folder, kinds)
    shutil.copy(path, bench.root / "models" / "model.gguf")
    with bench.db.write() as session:
        source = GgufModel(kind="gguf", path="model.gguf")
        model = inputs.add_model(session, tenant_id=bench.tenant_id, name="coded", source=source, facts=None)
    return replace(bench, model=model), path


def test_a_build_keeps_the_codes_of_the_file(bench: Bench, tmp_path: Path) -> None:
    bench, path = with_file(bench, tmp_path, TYPES)
    row = made_by(bench, JobKind.BUILD, build_request(bench, quantization={"scheme": "source"}))
    package = verify_package(bench.blobs, row.digest)
    assert package.manifest.scheme.name is Scheme.SOURCE
    export_gguf(package, None, tmp_path / "out")
    ours, theirs = GgufFile(tmp_path / "out/model.gguf"), GgufFile(path)
    assert all(np.array_equal(ours.raw(name), theirs.raw(name)) for name in theirs.tensors)
    report = bench.report(digest_of_role(part_of(bench, row, JobKind.QUANTIZATION), "report"))
    assert report["perplexity"]["loss_after"] == pytest.approx(report["perplexity"]["loss_before"], abs=1e-6)
    assert all(tensor["relative_error"] == 0 for tensor in report["tensors"])
    assert not (bench.root / "models/gguf").exists(), "the file is read in place"


@pytest.mark.parametrize(
    ("kinds", "words"),
    [(("Q5_0",), "as Q5_0. Scheme source keeps only Q8_0, Q4_0, Q4_1"), (None, "this model has none")],
)
def test_models_without_such_codes_are_refused(
    bench: Bench, tmp_path: Path, kinds: tuple[str, ...] | None, words: str
) -> None:
    if kinds is not None:
        bench, _ = with_file(bench, tmp_path, kinds)
    request = {"model_id": bench.model.id, "options": {"scheme": "source"}}
    job = bench.finish(JobKind.QUANTIZATION, request)
    assert job.state == "failed"
    assert words in str(job.error)
