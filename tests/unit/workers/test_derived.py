"""Tests of jobs that make a package from a package: pooling and export."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.engines.executorch.program import ProgramShape
from permille.package.limits import Role
from permille.package.manifest import Layer
from permille.package.reader import Package, verify_package
from permille.schemas.jobs import JobKind
from permille.store import artifacts
from permille.store.jobs import claims
from permille.store.tables import Artifact
from permille.training.pooling import Pooled
from permille.zo.packed_state import pooled_state
from permille_workers.runtime.context import JobCancelledError, PartsToAdd, TaskContext
from permille_workers.runtime.work_folders import locked_work_folder
from permille_workers.tasks import TASKS
from tests.packages import program_bytes
from tests.unit.workers.conftest import Bench
from tests.unit.workers.jobs import made_by, manifest_of

# --- pooling


def pooling_request(bench: Bench, package: Artifact, **changes: Any) -> dict[str, Any]:
    return {
        "package_digest": package.digest,
        "corpus_id": bench.corpus.id,
        "steps": 40,
        "rows": 2,
        "sequences": 60,
        "length": 24,
        **changes,
    }


def test_a_pooling_makes_a_package_that_carries_a_better_state(bench: Bench, package: Artifact) -> None:
    made = made_by(bench, JobKind.POOLING, pooling_request(bench, package))
    new = verify_package(bench.blobs, made.digest)
    state = pooled_state(new)
    assert state is not None and state.s_K.any()
    parent = manifest_of(bench, package)
    assert new.manifest.parent() == parent
    extra = set(new.manifest.layers) - set(parent.layers)
    assert {layer.role for layer in extra} == {Role.POOLED}
    assert (made.kind, made.model_id, made.k) == ("package", package.model_id, package.k)
    assert {blob.digest for blob in made.blobs} == {made.digest, *(x.digest for x in new.manifest.layers)}
    pooling = new.manifest.provenance["pooling"]
    assert isinstance(pooling, dict)
    assert (pooling["parent"], pooling["steps"], pooling["sequences"]) == (package.digest, 40, 60)
    assert float(str(pooling["loss_pooled"])) < float(str(pooling["loss_base"]))
    again = made_by(bench, JobKind.POOLING, pooling_request(bench, made, steps=30))
    assert manifest_of(bench, again).parent() == parent, "another state takes the first one's place"


def test_a_pooling_that_is_killed_goes_on(bench: Bench, package: Artifact) -> None:
    whole = made_by(bench, JobKind.POOLING, pooling_request(bench, package))
    job = bench.submit(JobKind.POOLING, pooling_request(bench, package))
    with bench.db.write() as session:
        claim = claims.claim(session, worker="bench", lease_s=600)
    assert claim is not None and claim.job_id == job.id
    seen: list[str] = []

    def dies(_: float, message: str) -> None:
        seen.append(message)
        if message == "step 33/40":
            raise JobCancelledError(job.id)

    def context(folder: Path, progress: Callable[[float, str], None]) -> TaskContext:
        return TaskContext(
            claim=claim,
            db=bench.db,
            blobs=bench.blobs,
            settings=bench.settings,
            work_folder=folder,
            progress=progress,
        )

    with locked_work_folder(bench.settings.work_root, job.id) as folder, pytest.raises(JobCancelledError):
        TASKS[JobKind.POOLING](context(folder, dies))
    first, seen[:] = list(seen), []
    with locked_work_folder(bench.settings.work_root, job.id) as folder:
        publish = TASKS[JobKind.POOLING](context(folder, lambda _, message: seen.append(message)))
    assert not isinstance(publish, PartsToAdd)
    steps = [message for message in seen if message.startswith("step")]
    assert (first[-1], steps[0], steps[-1]) == ("step 33/40", "step 21/40", "step 40/40")
    with bench.db.write() as session:
        assert publish(session) == whole.digest


def test_a_pooling_that_helps_nothing_publishes_nothing(bench: Bench, package: Artifact) -> None:
    def nothing(*_: object, **__: object) -> Pooled:
        s_K = np.zeros(package.k or 0, np.int64)
        return Pooled(s_K=s_K, step_unit_exponent=-14, loss_base=1.0, loss_pooled=0.99, gain=0.01, error=0.02)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("permille_workers.tasks.pooling.pool", nothing)
        failed = bench.finish(JobKind.POOLING, pooling_request(bench, package))
    assert failed.state == "failed"
    assert "surely better than the base" in str(failed.error)
    with bench.db.read() as session:
        page = artifacts.list_artifacts(session, tenant_id=bench.tenant_id, kind=JobKind.PACKAGE)
    assert [row.digest for row in page.items] == [package.digest]


# --- exports


def test_an_export_makes_a_package_that_carries_a_program(
    bench: Bench, package: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter is replaced. `make test-executorch` tests the real one."""

    def exported(of: Package, shape: ProgramShape, *, weights: str) -> Layer:
        assert (of.digest, weights) == (package.digest, "float32")
        data = program_bytes(repr(shape).encode())
        return Layer(role=Role.PROGRAM, digest=of.blobs.put_bytes(data), size_bytes=len(data))

    pooled = made_by(bench, JobKind.POOLING, pooling_request(bench, package))
    request = {"package_digest": pooled.digest, "weights": "float32", "variants": 2, "rows": 4, "tokens": 16}
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
    assert {layer.role for layer in set(new.manifest.layers) - set(parent.layers)} == {
        Role.POOLED,
        Role.PROGRAM,
    }
    assert new.manifest.parent() == parent and pooled_state(new) is not None
    export = new.manifest.provenance["export"]
    assert isinstance(export, dict)
    assert (export["parent"], export["weights"], export["rows"]) == (package.digest, "float32", 4)
