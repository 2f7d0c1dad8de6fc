"""Tests of the job that adds a program to a package."""

import sys

import pytest

from permille.engines.executorch.program import ProgramShape
from permille.package.limits import Role
from permille.package.manifest import Layer
from permille.package.reader import Package, verify_package
from permille.schemas.jobs import JobKind
from permille.store.tables import Artifact
from tests.packages import program_bytes
from tests.unit.workers.conftest import Bench
from tests.unit.workers.jobs import made_by, manifest_of


def test_an_export_makes_a_package_that_carries_a_program(
    bench: Bench, package: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter is replaced. `make test-executorch` tests the real one."""

    def exported(of: Package, shape: ProgramShape, *, weights: str) -> Layer:
        assert (of.digest, weights) == (package.digest, "float32")
        data = program_bytes(repr(shape).encode())
        return Layer(role=Role.PROGRAM, digest=of.blobs.put_bytes(data), size_bytes=len(data))

    request = {"package_digest": package.digest, "weights": "float32", "variants": 2, "rows": 4, "tokens": 16}
    refused = bench.finish(JobKind.EXPORT, {**request, "weights": "int4"})
    assert "need an int4 package, and this one is nf4" in str(refused.error)
    monkeypatch.setitem(sys.modules, "executorch", None)
    failed = bench.finish(JobKind.EXPORT, request)
    assert failed.state == "failed"
    assert "Exporting needs executorch. Run `pip install 'permille[executorch]'`" in str(failed.error)
    monkeypatch.setattr("permille.engines.executorch.exporting.export_program", exported)
    monkeypatch.setattr("permille_workers.tasks.export.versions", lambda *names: dict.fromkeys(names, "1"))
    failed = bench.finish(JobKind.EXPORT, {**request, "tokens": 4096})
    assert "positions, too few for 4096 tokens" in str(failed.error)
    made = made_by(bench, JobKind.EXPORT, request)
    new, parent = verify_package(bench.blobs, made.digest), manifest_of(bench, package)
    assert (made.kind, made.model_id, made.k) == ("package", package.model_id, package.k)
    assert {layer.role for layer in set(new.manifest.layers) - set(parent.layers)} == {Role.PROGRAM}
    assert {blob.digest for blob in made.blobs} == {made.digest, *(x.digest for x in new.manifest.layers)}
    assert new.manifest.parent() == parent
    export = new.manifest.provenance["export"]
    assert isinstance(export, dict)
    assert (export["parent"], export["weights"], export["rows"]) == (package.digest, "float32", 4)
    again = made_by(bench, JobKind.EXPORT, {**request, "package_digest": made.digest, "rows": 2})
    assert manifest_of(bench, again).parent() == parent, "another program takes the first one's place"
