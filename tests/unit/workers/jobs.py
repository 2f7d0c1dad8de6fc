"""Requests of jobs that a bench runs, and their results."""

from collections.abc import Callable
from typing import Any

from permille.package.manifest import Manifest
from permille.package.reader import Package
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import MAKES_PACKAGES
from permille.store import artifacts
from permille.store.tables import Artifact, Job
from tests.unit.workers.conftest import Bench

FISHER: dict[str, Any] = {"method": "fisher", "density": 0.01, "sequences": 6, "length": 32, "seed": 5}
NF4 = {"scheme": "nf4"}
AUTO_ROUND = {"scheme": "auto-round", "calibration_sequences": 4, "calibration_length": 16}
BenchMaker = Callable[[str], Bench]


def build_request(bench: Bench, **changes: Any) -> dict[str, Any]:
    return {
        "model_id": bench.model.id,
        "mask": {**FISHER, "corpus_id": bench.corpus.id},
        "quantization": {"scheme": "nf4", "evaluation_tokens": 512},
        "evaluation_corpus_id": bench.corpus.id,
        **changes,
    }


def fisher_request(bench: Bench, **options: Any) -> dict[str, Any]:
    return {"model_id": bench.model.id, "corpus_id": bench.corpus.id, **FISHER, **options}


def made_by(bench: Bench, kind: JobKind, request: dict[str, Any]) -> Artifact:
    """Run a job of this kind. Return its result. The result of a build is its package."""
    return artifact_of(bench, succeeded(bench.finish(kind, request)))


def artifact_of(bench: Bench, job: Job) -> Artifact:
    kind = JobKind.PACKAGE if job.kind in MAKES_PACKAGES else JobKind(job.kind)
    with bench.db.read() as session:
        return artifacts.get(session, tenant_id=bench.tenant_id, kind=kind, key=str(job.result_id))


def mask_of(bench: Bench, **options: Any) -> Artifact:
    return made_by(bench, JobKind.MASK, fisher_request(bench, **options))


def quantization_of(bench: Bench, evaluated: bool = False, **options: Any) -> Artifact:
    corpus_id = bench.corpus.id if evaluated else None
    request = {"model_id": bench.model.id, "evaluation_corpus_id": corpus_id, "options": options or NF4}
    return made_by(bench, JobKind.QUANTIZATION, request)


def package_of(bench: Bench, mask: Artifact, **options: Any) -> Artifact:
    parts = {"mask_id": mask.id, "quantization_id": quantization_of(bench).id}
    return made_by(bench, JobKind.PACKAGE, parts | options)


def part_of(bench: Bench, package: Artifact, kind: JobKind) -> Artifact:
    key = str(package.request[f"{kind}_id"])
    with bench.db.read() as session:
        return artifacts.get(session, tenant_id=bench.tenant_id, kind=kind, key=key)


def digest_of_role(artifact: Artifact, role: str) -> str:
    blob = artifacts.blob_of(artifact, role)
    assert blob is not None
    return blob.digest


def manifest_of(bench: Bench, package: Artifact) -> Manifest:
    return Package.open(bench.blobs, package.digest).manifest


def succeeded(job: Job) -> Job:
    assert job.state == "succeeded", job.error
    return job
