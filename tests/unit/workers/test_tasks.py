"""The real tasks on a tiny random model: from a registered folder to a verified package; replayed logs."""

import dataclasses
import hashlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from permille.choices import EstimatorKind
from permille.engines.executorch.program import ProgramShape
from permille.models.checkpoint import Checkpoint
from permille.package.limits import Role
from permille.package.manifest import Layer, Manifest
from permille.package.reader import Package, verify_package
from permille.quantization import dequantize, quantize, rounding
from permille.quantization.types import Sparsity
from permille.schemas.fields import EXAMPLE_ULID
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import MAKES_PACKAGES
from permille.schemas.runs import LogForm
from permille.sensitivity.masks import count
from permille.sensitivity.scores import load_scores
from permille.store import artifacts, devices, rows, runs, uploads
from permille.store.jobs import claims, queue
from permille.store.retention.references import references
from permille.store.settings import Quota
from permille.store.tables import Artifact, Job, Model, Run
from permille.training.pooling import Pooled
from permille.zo.exponents import exponents_of
from permille.zo.header import LogHeader, Schedule
from permille.zo.lattice import state_digest
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.packed_state import StateHeader, StateOrigin, encode_state, pooled_state
from permille.zo.records import StepFlag, StepRecord
from permille.zo.replay import replay
from permille_workers.runtime.context import JobCancelledError, Split, TaskContext
from permille_workers.runtime.work_folders import locked_work_folder, remove_ended, shared_store
from permille_workers.tasks import TASKS
from tests.packages import program_bytes
from tests.unit.package.tiny import pruned
from tests.unit.workers.conftest import Bench, save_model

QUOTA = Quota(
    runs_a_day=50,
    uploads_a_day=50,
    bytes_a_day=1 << 30,
    outstanding=50,
    runs_kept=50,
    uploads_kept=50,
    bytes_kept=1 << 30,
)

FISHER = {"method": "fisher", "density": 0.01, "sequences": 6, "length": 32, "seed": 5}
NF4 = {"scheme": "nf4"}
AUTO_ROUND = {"scheme": "auto-round", "calibration_sequences": 4, "calibration_length": 16}
RUN_ID = "5a0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11"
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
    """What a job of this kind makes. A build's is its package."""
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


def test_build_makes_a_package_that_a_stranger_accepts(bench: Bench) -> None:
    row = made_by(bench, JobKind.BUILD, build_request(bench))
    assert verify_package(bench.blobs, row.digest).k == row.k
    package = Package.open(bench.blobs, row.digest)
    model = bench.root / "models" / "tiny"
    assert package.file("tokenizer.json") == (model / "tokenizer.json").read_bytes()
    blobs = {blob.digest for blob in row.blobs}
    assert blobs == {row.digest, *(layer.digest for layer in package.manifest.layers)}
    assert row.size_bytes == sum(bench.blobs.size(digest) for digest in blobs) == package.size_bytes
    with bench.db.read() as session:
        assert {blob.digest for blob in bench.blobs.entries()} == references(session)


def test_a_mask_that_is_split_is_the_one_that_is_not(make_bench: BenchMaker, bench: Bench) -> None:
    """Shards in another order, one sum lost on the way, a model too large for the memory: the same mask,
    scores and provenance."""
    whole = mask_of(bench, sequences=37)
    split = make_bench("split")
    settings = split.settings.model_copy(update={"fisher_split_flops": 0, "memory_bytes": 1})
    split = dataclasses.replace(split, settings=settings)
    job = split.submit(JobKind.MASK, fisher_request(split, sequences=37))
    split.run_next()
    with split.db.read() as session:
        shards = list(queue.parts_of(session, split.read(job)))
    assert [(part.kind, part.payload["first"], part.payload["stop"]) for part in shards] == [
        ("shard", 0, 16),
        ("shard", 16, 32),
        ("shard", 32, 37),
    ]
    for part in reversed(shards):
        split.run_next(part.id)
    shared = shared_store(split.blobs).below(job.id)
    shared.delete(str(split.read(shards[1]).result_id))
    split.run_queued()
    found = artifact_of(split, succeeded(split.read(job)))
    assert found.digest == whole.digest
    assert found.provenance == whole.provenance
    assert remove_ended(split.db, split.settings.work_root, split.blobs)
    assert not shared.root.exists()


def test_perplexity_of_a_model_too_large_for_the_memory_is_the_same(bench: Bench) -> None:
    whole, parts = (
        quantization_of(dataclasses.replace(bench, settings=settings), evaluated=True)
        for settings in (bench.settings, bench.settings.model_copy(update={"memory_bytes": 1}))
    )
    assert digest_of_role(parts, "report") == digest_of_role(whole, "report")


def test_a_device_that_is_not_there_is_the_operators_affair(bench: Bench) -> None:
    settings = bench.settings.model_copy(update={"device": "cuda:99"})
    job = dataclasses.replace(bench, settings=settings).finish(JobKind.MASK, fisher_request(bench))
    assert (job.state, job.attempt) == ("failed", 1)
    assert "expected device cuda:99 (PERMILLE_DEVICE)" in str(job.error)


def test_the_values_are_the_models_own_bits(bench: Bench) -> None:
    row = made_by(bench, JobKind.BUILD, build_request(bench))
    package = Package.open(bench.blobs, row.digest)
    weights = load_file(bench.root / "models" / "tiny" / "model.safetensors")
    expected = np.concatenate(
        [weights[t.name].reshape(-1)[package.mask(t.name)] for t in package.manifest.tensors]
    )
    assert package.values().tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize("method", ["fisher", "random"])
def test_a_sparse_model_becomes_a_sparse_package(bench: Bench, method: str) -> None:
    """By itself, and only its kept weights are masked."""
    path = bench.root / "models" / "tiny" / "model.safetensors"
    weights = {
        name: pruned(weight, Sparsity.TWO_OF_FOUR) if "proj" in name else weight
        for name, weight in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    of = {"corpus_id": bench.corpus.id, **FISHER} if method == "fisher" else {"method": method}
    mask = {**of, "density": 0.4}
    row = made_by(bench, JobKind.BUILD, build_request(bench, mask=mask))
    package = verify_package(bench.blobs, row.digest)
    assert package.manifest.scheme.sparsity is Sparsity.TWO_OF_FOUR
    made = package.manifest.provenance["quantization"]
    assert isinstance(made, dict) and made["sparsity"] == "2:4"
    for info in package.manifest.tensors:
        assert weights[info.name].reshape(-1)[package.mask(info.name)].all()
        assert info.count == count(0.4, weights[info.name].size)
    dense = quantization_of(bench, scheme="nf4", sparsity="none")
    sizes = [artifacts.blob_of(one, "dense") for one in (dense, quantization_of(bench, scheme="nf4"))]
    assert sizes[0] is not None and sizes[1] is not None
    assert sizes[1].size_bytes < 0.75 * sizes[0].size_bytes
    if method == "fisher":
        report = bench.report(digest_of_role(mask_of(bench), "report"))
        full = next(point["fraction"] for point in report["curve"] if point["coverage"] == 1)
        assert full < 0.6, "half of the weights, which no mask can have, hold nothing"


def test_a_build_with_an_adapter_asks_for_no_mask(bench: Bench) -> None:
    adapter = {"kind": "lora", "rank": 4, "alpha": 8, "scope": "attention", "seed": 3}
    row = made_by(bench, JobKind.BUILD, {"model_id": bench.model.id, "adapter": adapter})
    package = verify_package(bench.blobs, row.digest)
    about = package.manifest.adapter
    assert about is not None and (about.kind, about.rank, about.scale) == ("lora", 4, 2.0)
    assert row.k == package.k == about.k and package.manifest.provenance["adapter"] == adapter
    with bench.db.read() as session:
        page = artifacts.list_artifacts(session, tenant_id=bench.tenant_id, kind=JobKind.MASK)
    assert not page.items
    too_much = {"model_id": bench.model.id, "adapter": {"kind": "lora", "rank": 256}}
    assert "choose a lower rank" in failed(bench, "build", too_much)


def test_the_same_inputs_give_the_same_package(make_bench: BenchMaker) -> None:
    digests = []
    for name in ("one", "two"):
        bench = make_bench(name)
        digests.append(made_by(bench, JobKind.BUILD, build_request(bench)).digest)
    assert digests[0] == digests[1]


def test_mask_reports_curve_table_and_what_was_read(bench: Bench) -> None:
    mask = mask_of(bench)
    report = bench.report(digest_of_role(mask, "report"))
    assert report["k"] == mask.k == sum(row["count"] for row in report["tensors"])
    assert report["curve"][-1] == pytest.approx({"fraction": 1.0, "coverage": 1.0})
    assert report["corpus"]["bad"]["not-json"]["count"] == 1
    assert report["provenance"]["model"]["digest"].startswith("sha256:")
    picture = bench.blobs.read(digest_of_role(mask, "picture"), limit=1 << 24)
    assert picture.startswith(b"\x89PNG")
    assert load_scores(bench.blobs.path(digest_of_role(mask, "scores"))).flat.max() > 0


def test_fisher_masks_the_weights_with_the_largest_scores(bench: Bench) -> None:
    mask = mask_of(bench)
    scores = load_scores(bench.blobs.path(digest_of_role(mask, "scores")))
    package = package_of(bench, mask)
    opened = Package.open(bench.blobs, package.digest)
    for tensor in opened.manifest.tensors:
        flat = scores[tensor.name].reshape(-1)
        chosen = opened.mask(tensor.name)
        assert flat[chosen].min() >= np.delete(flat, chosen).max()


@pytest.mark.parametrize("method", ["magnitude", "random"])
def test_masks_without_a_corpus(bench: Bench, method: str) -> None:
    mask = made_by(bench, JobKind.MASK, {"model_id": bench.model.id, "method": method, "density": 0.01})
    assert artifacts.blob_of(mask, "scores") is None
    assert bench.report(digest_of_role(mask, "report"))["score"] == "magnitude"


@pytest.mark.parametrize(("scope", "part"), [("attention", ".self_attn."), ("mlp", ".mlp.")])
def test_a_mask_of_one_part_of_the_layers_is_a_packages(bench: Bench, scope: str, part: str) -> None:
    row = made_by(bench, JobKind.BUILD, build_request(bench, mask={"method": "magnitude", "scope": scope}))
    manifest = manifest_of(bench, row)
    assert manifest.trainable.scope == scope
    chosen = [tensor.name for tensor in manifest.tensors if tensor.count]
    assert chosen and all(part in name for name in chosen)


def test_quantization_reports_errors_and_perplexity_on_held_out_text(bench: Bench) -> None:
    row = quantization_of(bench, evaluated=True, **NF4, evaluation_tokens=512)
    report = bench.report(digest_of_role(row, "report"))
    assert len(report["tensors"]) == 14
    assert all(0 < tensor["relative_error"] < 0.2 for tensor in report["tensors"])
    assert report["perplexity"]["held_out"] is True
    assert report["perplexity"]["tokens"] > 200
    assert report["perplexity"]["before"] != report["perplexity"]["after"]


@pytest.fixture
def quick_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of auto-round's steps, each ten times as long."""
    monkeypatch.setattr(rounding.rounded_int4, "__kwdefaults__", {"iterations": 20})


def test_a_small_corpus_is_measured_on_what_there_is_and_says_so(bench: Bench, quick_rounding: None) -> None:
    options = AUTO_ROUND | {"calibration_sequences": 12, "calibration_length": 128}
    row = quantization_of(bench, evaluated=True, **options, calibration_corpus_id=bench.corpus.id)
    assert bench.report(digest_of_role(row, "report"))["perplexity"]["held_out"] is False


@pytest.mark.parametrize(("scheme", "group_size"), [("int4", 32), ("int4", 128), ("int8", 128)])
def test_packages_of_integers(bench: Bench, scheme: str, group_size: int) -> None:
    quantization = {"scheme": scheme, "group_size": group_size}
    row = made_by(bench, JobKind.BUILD, build_request(bench, quantization=quantization))
    how = manifest_of(bench, row).scheme
    assert (how.name, how.group_size) == (scheme, group_size)


SQUEEZELLM = {"scheme": "squeezellm", "evaluation_tokens": 512}


def test_code_books_are_made_for_the_scores_of_the_builds_mask_or_of_another(bench: Bench) -> None:
    package = made_by(bench, JobKind.BUILD, build_request(bench, quantization=SQUEEZELLM))
    mask, ours = (part_of(bench, package, kind) for kind in (JobKind.MASK, JobKind.QUANTIZATION))
    assert ours.request["options"] == SQUEEZELLM | {"mask_id": mask.id}
    assert ours.provenance["scores"] == digest_of_role(mask, "scores")
    opened = Package.open(bench.blobs, package.digest)
    scores = load_scores(bench.blobs.path(digest_of_role(mask, "scores")))
    checkpoint = Checkpoint(bench.root / "models" / "tiny")
    for name, scores_NK in scores.items():
        expected = quantize(checkpoint.float32(name), "squeezellm", 0, scores_NK=scores_NK)
        assert np.array_equal(dequantize(opened.quantized(name)), dequantize(expected))
    measured = bench.report(digest_of_role(ours, "report"))["perplexity"]
    assert measured["held_out"] is True and measured["before"] != measured["after"]
    alone = quantization_of(bench, scheme="squeezellm", mask_id=mask.id)
    assert alone.digest == ours.digest
    other = quantization_of(bench, scheme="squeezellm", mask_id=mask_of(bench, seed=6).id)
    assert other.digest != ours.digest


def test_what_code_books_cannot_be_made_of_is_refused(bench: Bench) -> None:
    def refused(mask: Artifact) -> str:
        options = SQUEEZELLM | {"mask_id": mask.id}
        return failed(bench, "quantization", {"model_id": bench.model.id, "options": options})

    assert "of all linears" in refused(mask_of(bench, scope="mlp"))
    largest = {"model_id": bench.model.id, "method": "magnitude"}
    assert "which has none" in refused(made_by(bench, JobKind.MASK, largest))
    mask = mask_of(bench)
    with bench.db.write() as session:
        row = artifacts.get(session, tenant_id=bench.tenant_id, kind=JobKind.MASK, key=mask.id)
        row.provenance = {"model": {}}
    assert "to be made of" in refused(mask)


def test_a_package_that_auto_round_has_calibrated_is_read_as_any_other(
    bench: Bench, quick_rounding: None
) -> None:
    options = {**AUTO_ROUND, "calibration_corpus_id": bench.corpus.id, "evaluation_tokens": 512}
    row = made_by(bench, JobKind.BUILD, build_request(bench, quantization=options))
    package = Package.open(bench.blobs, row.digest)
    nearest = quantization_of(bench, scheme="int4", group_size=128)
    ours = part_of(bench, row, JobKind.QUANTIZATION)
    assert ours.request["options"] == options | {"group_size": 128}
    assert ours.provenance["rounding"] == "auto-round"
    calibration, versions = ours.provenance["calibration"], ours.provenance["versions"]
    assert isinstance(calibration, dict) and isinstance(versions, dict)
    assert calibration | {"corpus": None} == {"corpus": None, "sequences": 4, "length": 16, "seed": 0}
    assert "auto-round" in versions
    report, plain = (bench.report(digest_of_role(one, "report")) for one in (ours, nearest))
    assert report["calibration_corpus"]["bad"]["not-json"]["count"] == 1
    assert len(report["tensors"]) == 14
    # Nearest is nearest: what the rest of a block makes up for costs a weight alone.
    errors = [sum(tensor["relative_error"] for tensor in one["tensors"]) for one in (report, plain)]
    assert errors[1] < errors[0] < 3 * errors[1]
    assert report["perplexity"]["before"] != report["perplexity"]["after"]
    name = report["tensors"][0]["name"]
    assert package.manifest.scheme.group_size == 128 and package.quantized(name).shape == (32, 32)
    assert ours.digest != nearest.digest


def test_what_auto_round_cannot_do_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**AUTO_ROUND, "calibration_corpus_id": bench.corpus.id}
    request = {"model_id": bench.model.id, "options": options}
    too_much = options | {"calibration_sequences": 4000, "calibration_length": 4000}
    assert "sequences of 128 tokens" in failed(bench, "quantization", request | {"options": too_much})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "permille[workers" in failed(bench, "quantization", request)


def failed(bench: Bench, kind: str, payload: dict[str, Any]) -> str:
    job = bench.finish(kind, payload)
    assert job.state == "failed"
    assert job.error is not None
    assert job.error["retryable"] is False
    return str(job.error["message"])


def test_a_model_that_changed_is_refused(bench: Bench) -> None:
    mask_of(bench)
    save_model(bench.root / "models" / "tiny", seed=1)
    assert "as they were" in failed(bench, "quantization", {"model_id": bench.model.id})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus_id": None}, "corpus_id"),
        ({"method": "guess"}, "Input tag 'guess'"),
        ({"allocation": "fair"}, "'tensor' or 'global'"),
        ({"scope": "layers:7-"}, "layers"),
        ({"sequences": 100_000}, "sequences"),
        ({"model_id": f"model_{EXAMPLE_ULID}"}, "no model"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_masks_that_cannot_be_made_fail_with_the_reason(
    bench: Bench, changes: dict[str, Any], message: str
) -> None:
    assert message in failed(bench, "mask", fisher_request(bench, **changes))


@pytest.mark.parametrize(("kind", "field"), [("mask", "corpus_id"), ("quantization", "evaluation_corpus_id")])
def test_a_corpus_of_which_much_is_broken_is_refused_with_the_numbers(
    bench: Bench, kind: str, field: str
) -> None:
    path = bench.root / "corpora" / "rows.jsonl"
    path.write_text("no json\n" * 300 + path.read_text())
    request = fisher_request(bench) if kind == "mask" else {"model_id": bench.model.id}
    message = failed(bench, kind, request | {field: bench.corpus.id})
    assert "broken rows" in message and "not-json" in message


def test_a_corpus_outside_the_root_is_refused(bench: Bench) -> None:
    (bench.root / "secret.txt").write_text("secret " * 1000)
    (bench.root / "corpora" / "rows.jsonl").unlink()
    (bench.root / "corpora" / "rows.jsonl").symlink_to(bench.root / "secret.txt")
    assert "below the root, got none" in failed(bench, "mask", fisher_request(bench))


def test_a_damaged_mask_layer_is_refused(bench: Bench) -> None:
    """As an attempt that may be repeated: the blob may be whole then. Here it was the last one."""
    mask = mask_of(bench)
    quantization = quantization_of(bench)
    path = bench.blobs.path(mask.digest)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    payload = {"mask_id": mask.id, "quantization_id": quantization.id}
    job = bench.finish("package", payload)
    assert job.state == "dead"
    assert "blob-digest" in str(job.error)


def test_the_first_job_stores_what_the_model_is(bench: Bench) -> None:
    mask_of(bench)
    with bench.db.read() as session:
        model = rows.get(session, Model, tenant_id=bench.tenant_id, row_id=bench.model.id)
    assert (model.family, model.parameter_count) == ("llama", 28_832)
    assert model.digest is not None


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
    assert not isinstance(publish, Split)
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
    """The exporter is not installed here (`make test-executorch` runs what it makes)."""

    def exported(of: Package, shape: ProgramShape, *, weights: str) -> Layer:
        assert (of.digest, weights) == (package.digest, "float32")
        data = program_bytes(repr(shape).encode())
        return Layer(role=Role.PROGRAM, digest=of.blobs.put_bytes(data), size_bytes=len(data))

    pooled = made_by(bench, JobKind.POOLING, pooling_request(bench, package))
    request = {"package_digest": pooled.digest, "weights": "float32", "variants": 2, "rows": 4, "tokens": 16}
    refused = bench.finish(JobKind.EXPORT, {**request, "weights": "int4"})
    assert "expected an int4 package for 4-bit weights, got nf4" in str(refused.error)
    monkeypatch.setitem(sys.modules, "executorch", None)
    failed = bench.finish(JobKind.EXPORT, request)
    assert failed.state == "failed"
    assert "exporting needs executorch: pip install 'permille[executorch]'" in str(failed.error)
    monkeypatch.setattr("permille.engines.executorch.exporting.export_program", exported)
    monkeypatch.setattr("permille_workers.tasks.export.versions", lambda *names: dict.fromkeys(names, "1"))
    failed = bench.finish(JobKind.EXPORT, {**request, "tokens": 4096})
    assert "expected at most the model's" in str(failed.error)
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


# --- replay


def shared_log(bench: Bench, package: Artifact, **changes: Any) -> bytes:
    manifest = manifest_of(bench, package)
    fields: dict[str, Any] = {
        "package_digest": package.digest,
        "mask_digest": manifest.mask_digest,
        "seed": 7,
        "estimator": EstimatorKind.SPSA,
        "queries": 2,
        "epsilon": 1e-2,
        "learning_rate": 1e-2,
        "schedule": Schedule.CONSTANT,
        "total_steps": 5,
        "step_unit_exponent": -20,
        "counts": manifest.counts,
        **changes,
    }
    records = [
        StepRecord(step=step, coefficients=(step + 1, -3 * step), loss=1.0, flags=StepFlag.NONE)
        for step in range(5)
    ]
    return encode_canonical(LogHeader(**fields), records)


def state_of(data: bytes) -> str:
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=100)
    s_K = replay(log.header, log.coefficients_TQ)
    return state_digest(
        s_K, mask_digest=log.header.mask_digest, step_unit_exponent=log.header.step_unit_exponent
    )


def queued_replay(
    bench: Bench, package: Artifact, data: bytes, claimed: str | None, form: LogForm = LogForm.LOG
) -> Job:
    with bench.db.write() as session:
        _, code = devices.invite(session, tenant_id=bench.tenant_id, release="r", alias="stable")
        device = devices.enrol(session, code=code, public_key="k", name="n", agent_version="1.0.0").device
        metrics: dict[str, object] = {"package_digest": package.digest, "state_digest": claimed}
        runs.report(session, tenant_id=bench.tenant_id, device_id=device.id, run_id=RUN_ID, metrics=metrics)
        upload_id = uploads.begin(
            session, tenant_id=bench.tenant_id, device_id=device.id, run_id=RUN_ID, quota=QUOTA
        ).id
        folder = uploads.open_folder(bench.blobs, tenant_id=bench.tenant_id, upload_id=upload_id)
        digest = folder.put_bytes(data)
        _, job = runs.attach_log(
            session,
            tenant_id=bench.tenant_id,
            device_id=device.id,
            run_id=RUN_ID,
            log=runs.SentLog(form=form, digest=digest, size_bytes=len(data), upload_id=upload_id),
        )
    return job


def replayed(
    bench: Bench, package: Artifact, data: bytes, claimed: str | None, form: LogForm = LogForm.LOG
) -> Run:
    job = queued_replay(bench, package, data, claimed, form)
    bench.run_queued()
    succeeded(bench.read(job))
    with bench.db.read() as session:
        return runs.get(session, tenant_id=bench.tenant_id, run_id=RUN_ID)


@pytest.fixture
def package(bench: Bench) -> Artifact:
    request = {"model_id": bench.model.id, "method": "random", "density": 0.01}
    return package_of(bench, made_by(bench, JobKind.MASK, request))


def test_replay_verifies_the_devices_state(bench: Bench, package: Artifact) -> None:
    data = shared_log(bench, package)
    run = replayed(bench, package, data, state_of(data))
    assert (run.log_state, run.log_reason, run.state_digest) == ("verified", None, state_of(data))


def test_replay_reads_the_layers_that_a_log_needs(bench: Bench) -> None:
    scaled = package_of(bench, mask_of(bench), fisher_exponents=True)
    exponents = exponents_of(Package.open(bench.blobs, scaled.digest))
    assert exponents is not None
    data = shared_log(bench, scaled, exponents=exponents.use)
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=100)
    s_K = replay(log.header, log.coefficients_TQ, exponents)
    digest = state_digest(s_K, mask_digest=log.header.mask_digest, step_unit_exponent=-20)

    run = replayed(bench, scaled, data, digest)

    assert (run.log_state, run.log_reason, run.state_digest) == ("verified", None, digest)


def test_replay_refuses_another_state(bench: Bench, package: Artifact) -> None:
    data = shared_log(bench, package)
    run = replayed(bench, package, data, "sha256:" + "0" * 64)
    assert (run.log_state, run.state_digest) == ("refused", state_of(data))
    assert "state-differs" in str(run.log_reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"package_digest": "sha256:" + "1" * 64},
        {"mask_digest": "sha256:" + "1" * 64},
        {"counts": (1, 2, 3)},
    ],
)
def test_replay_refuses_a_foreign_log(bench: Bench, package: Artifact, changes: dict[str, Any]) -> None:
    run = replayed(bench, package, shared_log(bench, package, **changes), None)
    assert run.log_state == "refused"
    assert "log-foreign" in str(run.log_reason)


def test_replay_refuses_a_malformed_log(bench: Bench, package: Artifact) -> None:
    data = shared_log(bench, package)
    run = replayed(bench, package, data[:-1] + bytes([data[-1] ^ 1]), None)
    assert run.log_state == "refused"
    assert "log-corrupt" in str(run.log_reason)


def test_replay_opens_no_package_for_a_log_that_needs_no_layer(bench: Bench, package: Artifact) -> None:
    data = shared_log(bench, package, estimator=EstimatorKind.ONE_SIDED)
    bench.blobs.delete(manifest_of(bench, package).layer(Role.DENSE).digest)
    assert replayed(bench, package, data, state_of(data)).log_state == "verified"


def damaged_dense(bench: Bench, manifest: Manifest) -> None:
    bench.blobs.delete(manifest.layer(Role.DENSE).digest)


def damaged_exponents(bench: Bench, manifest: Manifest) -> None:
    path = bench.blobs.path(manifest.layer(Role.EXPONENTS).digest)
    path.chmod(0o644)
    path.write_bytes(bytes(len(path.read_bytes())))


def deleted_log(bench: Bench, _: Manifest) -> None:
    shutil.rmtree(bench.settings.blob_root / "uploads" / bench.tenant_id)


@pytest.mark.parametrize("damage", [damaged_dense, damaged_exponents, deleted_log])
def test_a_damaged_blob_of_the_service_is_no_verdict_on_the_devices_log(
    bench: Bench, damage: Callable[[Bench, Manifest], None]
) -> None:
    package = package_of(bench, mask_of(bench), fisher_exponents=True)
    exponents = exponents_of(Package.open(bench.blobs, package.digest))
    assert exponents is not None
    data = shared_log(bench, package, exponents=exponents.use)
    job = queued_replay(bench, package, data, None)
    damage(bench, manifest_of(bench, package))
    with bench.db.write() as session:
        rows.get(session, Job, tenant_id=bench.tenant_id, row_id=job.id).max_attempts = 1
    bench.run_queued()
    after = bench.read(job)
    assert after.state == "dead" and "whole among the blobs" in str(after.error)
    with bench.db.read() as session:
        run = runs.get(session, tenant_id=bench.tenant_id, run_id=RUN_ID)
    assert run.log_state == "undecided"
    assert str(run.log_reason).startswith("replay-failed: ")


def test_a_stopped_fisher_job_goes_on_after_its_last_shard(bench: Bench) -> None:
    """The sums of finished shards survive in the work folder; the mask is that of an uninterrupted job."""
    whole = mask_of(bench, sequences=40, length=16)
    job = bench.submit("mask", fisher_request(bench, sequences=40, length=16))
    folder = stop_after(bench, 20)
    assert [path.name.endswith("-1.safetensors") for path in folder.joinpath("fisher").iterdir()] == [True]
    with bench.db.write() as session:
        queue.retry(session, tenant_id=bench.tenant_id, job_id=job.id)
    bench.run_queued()
    resumed = artifact_of(bench, succeeded(bench.read(job)))
    for role in ("mask", "scores"):
        assert digest_of_role(resumed, role) == digest_of_role(whole, role)


def stop_after(bench: Bench, sequences: int) -> Path:
    """Run the queued mask job up to a sequence, then cancel it; return its work folder."""

    def progress(fraction: float, message: str) -> None:
        if message.startswith(f"fisher {sequences}/"):
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
            TASKS["mask"](context)
    with bench.db.write() as session:
        claims.cancelled(session, claim)
    return folder


def test_the_same_mask_gives_the_same_report_and_picture(bench: Bench) -> None:
    first, second = mask_of(bench), mask_of(bench)
    for role in ("report", "picture"):
        assert digest_of_role(first, role) == digest_of_role(second, role)


# --- packed states in a log's place

OTHER = "sha256:" + "1" * 64


def sent_state(bench: Bench, package: Artifact, **changes: Any) -> tuple[bytes, str]:
    """A packed state of every masked weight, and the digest of the state."""
    manifest = manifest_of(bench, package)
    fields: dict[str, Any] = {
        "package_digest": package.digest,
        "mask_digest": manifest.mask_digest,
        "step_unit_exponent": -20,
        "k": manifest.k,
        "origin": StateOrigin.PERSONAL,
        **changes,
    }
    s_K = np.arange(fields["k"], dtype=np.int64) - 7
    data = encode_state(StateHeader(**fields), s_K)
    return data, state_digest(s_K, mask_digest=fields["mask_digest"], step_unit_exponent=-20)


def test_a_packed_state_is_verified_by_its_digest(bench: Bench, package: Artifact) -> None:
    data, digest = sent_state(bench, package)
    run = replayed(bench, package, data, digest, LogForm.STATE)
    assert (run.log_state, run.log_reason, run.state_digest) == ("verified", None, digest)
    assert run.log_form == "state"


FOREIGN_STATES: list[tuple[str, dict[str, Any]]] = [
    ("state-binding", {"package_digest": OTHER}),
    ("state-binding", {"mask_digest": OTHER}),
    ("state-binding", {"k": 3}),
    ("state-limit", {"k": 20_000}),
    ("state-binding", {"origin": StateOrigin.POOLED}),
]


@pytest.mark.attack(13, "uploads a state of another package, mask, size or origin")
@pytest.mark.parametrize(("code", "changes"), FOREIGN_STATES)
def test_a_foreign_state_is_refused(
    bench: Bench, package: Artifact, code: str, changes: dict[str, Any]
) -> None:
    data, digest = sent_state(bench, package, **changes)
    run = replayed(bench, package, data, digest, LogForm.STATE)
    assert (run.log_state, run.state_digest) == ("refused", None)
    assert code in str(run.log_reason)


def resealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


MALFORMED_STATES: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("state-corrupt", lambda data: data[:-1]),
    ("state-corrupt", lambda data: data[:-33] + bytes([data[-33] ^ 1]) + data[-32:]),
    ("state-content", lambda data: resealed(data[:-33])),
    ("state-content", lambda data: resealed(data[:-32] + b"\0")),
    ("state-corrupt", lambda data: b""),
]


@pytest.mark.attack(13, "uploads a state that is cut, flipped or followed by more")
@pytest.mark.parametrize(("code", "change"), MALFORMED_STATES)
def test_a_malformed_state_is_refused(
    bench: Bench, package: Artifact, code: str, change: Callable[[bytes], bytes]
) -> None:
    data, digest = sent_state(bench, package)
    run = replayed(bench, package, change(data), digest, LogForm.STATE)
    assert run.log_state == "refused"
    assert code in str(run.log_reason)


@pytest.mark.attack(13, "uploads a state with an integer beyond 2^53")
def test_a_state_beyond_the_exact_range_is_refused(bench: Bench, package: Artifact) -> None:
    data, digest = sent_state(bench, package)
    head = data[: 12 + int.from_bytes(data[8:12], "little")]
    k = manifest_of(bench, package).k
    block = b"\x37" + (2**54 + 1).to_bytes(-(-55 * k // 8), "little")
    run = replayed(bench, package, resealed(head + block), digest, LogForm.STATE)
    assert run.log_state == "refused"
    assert "state-content" in str(run.log_reason)


@pytest.mark.attack(13, "uploads another state than the one it reported")
def test_another_state_than_the_reported_one_is_refused(bench: Bench, package: Artifact) -> None:
    data, digest = sent_state(bench, package)
    run = replayed(bench, package, data, OTHER, LogForm.STATE)
    assert (run.log_state, run.state_digest) == ("refused", digest)
    assert "state-differs" in str(run.log_reason)


@pytest.mark.attack(13, "uploads a log as a state, and a state as a log")
@pytest.mark.parametrize("form", list(LogForm))
def test_the_form_that_was_said_is_the_one_that_is_read(
    bench: Bench, package: Artifact, form: LogForm
) -> None:
    data = shared_log(bench, package) if form is LogForm.STATE else sent_state(bench, package)[0]
    assert replayed(bench, package, data, None, form).log_state == "refused"
