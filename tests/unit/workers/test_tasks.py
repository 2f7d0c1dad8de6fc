"""Tests of the real tasks on a tiny random model: from a registered folder to a verified package."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import permille
from permille.choices import StreamedDataset
from permille.corpora.sequences import token_sequences
from permille.corpora.sources import ReadReport, file_texts
from permille.errors import RetryableError
from permille.models.loading import FileTokenizer, load_model
from permille.package.limits import Role
from permille.package.manifest import Manifest
from permille.package.reader import Package, verify_package
from permille.quantization import dequantize, rounding
from permille.schemas.fields import EXAMPLE_ULID
from permille.schemas.inputs import FolderModel, StreamedCorpus
from permille.schemas.jobs import JobKind
from permille.sensitivity.fisher import fisher_scores
from permille.sensitivity.masks import count
from permille.store import artifacts, inputs, rows
from permille.store.jobs import claims, queue
from permille.store.retention.collection import references
from permille.store.tables import Model
from permille.training.basis import USERS
from permille_workers.runtime.child import attempt
from permille_workers.runtime.context import JobCancelledError, TaskContext
from permille_workers.runtime.work_folders import locked_work_folder, remove_ended, shared_store
from permille_workers.tasks import TASKS, quantization
from tests.tiny_model import write_published
from tests.unit.workers.conftest import Bench, save_model
from tests.unit.workers.jobs import (
    AUTO_ROUND,
    FISHER,
    NF4,
    BenchMaker,
    artifact_of,
    build_request,
    digest_of_role,
    fisher_request,
    made_by,
    manifest_of,
    mask_of,
    package_of,
    part_of,
    quantization_of,
    succeeded,
)


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


def test_build_learns_a_basis_if_it_is_asked_to(bench: Bench) -> None:
    row = made_by(bench, JobKind.BUILD, build_request(bench, basis=True))
    package = verify_package(bench.blobs, row.digest)
    basis = package.basis()
    assert basis is not None and basis.columns_RK.shape == (USERS, package.k)
    assert package.manifest.provenance["basis"]
    bare = made_by(bench, JobKind.BUILD, build_request(bench))
    assert bare.digest == bench.blobs.put_bytes(without_basis(package.manifest).to_bytes())


def without_basis(manifest: Manifest) -> Manifest:
    provenance = {name: value for name, value in manifest.provenance.items() if name != "basis"}
    layers = tuple(layer for layer in manifest.layers if layer.role is not Role.BASIS)
    return dataclasses.replace(manifest, layers=layers, provenance=provenance)


def test_a_basis_without_public_text_is_refused(bench: Bench) -> None:
    adapter = {"kind": "lora", "rank": 4}
    request = {"model_id": bench.model.id, "adapter": adapter, "basis": True}
    job = bench.finish(JobKind.BUILD, request)
    assert job.error is not None and "A basis needs public text" in str(job.error["message"])


@pytest.mark.parametrize("first", ["mask", "quantization"])
def test_too_little_text_for_a_basis_ends_the_first_step_of_a_build(bench: Bench, first: str) -> None:
    shorten(bench)
    request = build_request(bench, basis=True)
    if first == "mask":
        request["mask"] |= {"sequences": 1}
    else:
        request |= {"mask": None, "adapter": {"kind": "lora", "rank": 4}}
    message = failed(bench, JobKind.BUILD, request)
    assert message.startswith(first)
    assert "A basis needs 12 rows of public text or more." in message


@pytest.mark.parametrize("evaluated", [False, True])
def test_too_little_text_for_later_steps_ends_the_mask_of_a_build(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, evaluated: bool
) -> None:
    # Enough for a sequence of 8 tokens, but not for a row of a reference (64) or of an evaluation (128).
    (bench.root / "corpora" / "rows.jsonl").write_text('{"text": "few words, and then some more"}')
    monkeypatch.delattr("permille_workers.tasks.mask._scored")
    request = build_request(bench)
    request["mask"] |= {"sequences": 1, "length": 8}
    request["evaluation_corpus_id"] = bench.corpus.id if evaluated else None
    message = failed(bench, JobKind.BUILD, request)
    assert message.startswith("mask")
    assert f"It must have at least {128 if evaluated else 64} tokens" in message


def test_too_little_text_to_evaluate_ends_a_quantization_before_its_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bench.root / "corpora" / "rows.jsonl").write_text('{"text": "few words"}')
    monkeypatch.delattr("permille_workers.tasks.quantization.nearest_codes")
    request = {"model_id": bench.model.id, "options": NF4, "evaluation_corpus_id": bench.corpus.id}
    assert "The corpus is too small" in failed(bench, JobKind.QUANTIZATION, request)


def test_too_little_text_for_a_basis_ends_a_package_before_its_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"mask_id": mask_of(bench).id, "quantization_id": quantization_of(bench).id}
    shorten(bench)
    monkeypatch.delattr("permille_workers.tasks.package.pack")
    assert "A basis needs 12 rows" in failed(bench, JobKind.PACKAGE, parts | {"basis": True})


def shorten(bench: Bench) -> None:
    path = bench.root / "corpora" / "rows.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[1:12]))


def test_a_notebook_makes_the_layers_of_a_build(bench: Bench, tmp_path: Path) -> None:
    row = made_by(bench, JobKind.BUILD, build_request(bench))
    texts = list(file_texts(bench.root / "corpora/rows.jsonl", ReadReport()))
    model = permille.load_model(bench.root / "models/tiny")
    mask = permille.sensitivity_mask(model, texts, density=0.01, sequences=6, length=32, seed=5)
    package = permille.build_package(model, mask, tmp_path / "packages", texts=texts)
    assert package.manifest.layers == manifest_of(bench, row).layers


def test_a_job_whose_corpus_cannot_be_reached_opens_no_model(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with bench.db.write() as session:
        source = StreamedCorpus(kind="streamed", dataset=StreamedDataset.C4)
        corpus = inputs.add_corpus(session, tenant_id=bench.tenant_id, name="c4", source=source)
    job = bench.finish(JobKind.MASK, {"model_id": bench.model.id, "corpus_id": corpus.id, **FISHER})
    assert job.error is not None and "Cannot reach the hub for c4" in str(job.error["message"])
    assert job.message == "reaching the corpus"
    with bench.db.read() as session:
        row = rows.get(session, Model, tenant_id=bench.tenant_id, row_id=bench.model.id)
    assert row.digest is None, "the jobs have opened the model"


def test_a_mask_that_is_split_is_the_one_that_is_not(
    make_bench: BenchMaker, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split a mask job that exceeds the memory, run its shards in reverse order, and lose one sum.

    Mask, scores and provenance must equal those of a job that is not split.
    """
    whole = mask_of(bench, sequences=37)
    split = make_bench("split")
    settings = split.settings.model_copy(update={"memory_bytes": 1, "fisher_split_flops": 0.0})
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


def test_a_device_that_is_not_there_is_the_operators_affair(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    settings = bench.settings.model_copy(update={"device": "cuda:99"})
    job = dataclasses.replace(bench, settings=settings).finish(JobKind.MASK, fisher_request(bench))
    assert (job.state, job.attempt) == ("failed", 1)
    assert "PERMILLE_DEVICE is cuda:99" in str(job.error)
    assert "failed: PERMILLE_DEVICE is cuda:99" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("cause", "shown"), [(None, False), (OSError("wire"), False), (TypeError("a bug"), True)]
)
def test_the_log_has_the_traceback_of_a_librarys_failure(
    bench: Bench, caplog: pytest.LogCaptureFixture, cause: Exception | None, shown: bool
) -> None:
    def broken(_context: TaskContext) -> Any:
        raise RetryableError("Cannot reach the hub.") from cause

    bench.submit(JobKind.MASK, fisher_request(bench))
    with bench.db.write() as session:
        claim = claims.claim(session, worker="bench", lease_s=600)
    assert claim is not None
    attempt({"mask": broken}, bench.db, claim, bench.settings)
    assert "failed: Cannot reach the hub." in caplog.text
    assert ("Traceback" in caplog.text) is shown


def test_a_quantization_does_not_wait_for_the_corpus_of_the_mask(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise RetryableError("Cannot reach the hub.")

    monkeypatch.setattr(quantization, "check_text_of_build", unreachable)
    assert quantization_of(bench).digest.startswith("sha256:")


def test_the_values_are_the_models_own_bits(bench: Bench) -> None:
    row = made_by(bench, JobKind.BUILD, build_request(bench))
    package = Package.open(bench.blobs, row.digest)
    weights = load_file(bench.root / "models" / "tiny" / "model.safetensors")
    expected = np.concatenate(
        [weights[t.name].reshape(-1)[package.mask(t.name)] for t in package.manifest.tensors]
    )
    assert package.values().tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize("method", ["fisher", "random"])
def test_zeros_of_a_sparse_model_stay_zeros_and_are_not_masked(bench: Bench, method: str) -> None:
    path = bench.root / "models" / "tiny" / "model.safetensors"
    weights = load_file(path)
    for name in (name for name in weights if "proj" in name):
        weights[name].reshape(-1, 4)[:, 1:3] = 0
    save_file(weights, path, metadata={"format": "pt"})
    of = {"corpus_id": bench.corpus.id, **FISHER} if method == "fisher" else {"method": method}
    mask = {**of, "density": 0.4}
    row = made_by(bench, JobKind.BUILD, build_request(bench, mask=mask))
    package = verify_package(bench.blobs, row.digest)
    for info in package.manifest.tensors:
        assert not dequantize(package.quantized(info.name))[weights[info.name] == 0].any()
        assert weights[info.name].reshape(-1)[package.mask(info.name)].all()
        assert info.count == count(0.4, weights[info.name].size)
    if method == "fisher":
        report = bench.report(digest_of_role(mask_of(bench), "report"))
        full = next(point["fraction"] for point in report["curve"] if point["coverage"] > 0.999_999)
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
    assert "Choose a lower rank" in failed(bench, "build", too_much)


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


def test_fisher_masks_the_weights_with_the_largest_scores(bench: Bench) -> None:
    mask = mask_of(bench)
    folder, texts = (
        bench.root / "models" / "tiny",
        file_texts(bench.root / "corpora" / "rows.jsonl", ReadReport()),
    )
    asked = (FISHER["sequences"], FISHER["length"], FISHER["seed"])
    scores = fisher_scores(load_model(folder), token_sequences(FileTokenizer(folder), texts, *asked))
    package = package_of(bench, mask)
    opened = Package.open(bench.blobs, package.digest)
    for tensor in opened.manifest.tensors:
        flat = scores[tensor.name].reshape(-1)
        chosen = opened.mask(tensor.name)
        assert flat[chosen].min() >= np.delete(flat, chosen).max()


@pytest.mark.parametrize("method", ["magnitude", "random"])
def test_masks_without_a_corpus(bench: Bench, method: str) -> None:
    mask = made_by(bench, JobKind.MASK, {"model_id": bench.model.id, "method": method, "density": 0.01})
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
    """Give auto-round a tenth of its steps. Each is ten times as long."""
    monkeypatch.setattr(rounding.rounded_int4, "__kwdefaults__", {"iterations": 20})


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_package_that_auto_round_has_calibrated_is_read_as_any_other(
    bench: Bench, quick_rounding: None
) -> None:
    options = {**AUTO_ROUND, "calibration_corpus_id": bench.corpus.id, "evaluation_tokens": 512}
    row = made_by(bench, JobKind.BUILD, build_request(bench, quantization=options))
    package = Package.open(bench.blobs, row.digest)
    nearest = quantization_of(bench, scheme="int4", group_size=128)
    ours = part_of(bench, row, JobKind.QUANTIZATION)
    assert ours.request["options"] == options | {"group_size": 128, "embeddings": "q8_0"}
    assert ours.provenance["rounding"] == "auto-round"
    calibration, versions = ours.provenance["calibration"], ours.provenance["versions"]
    assert isinstance(calibration, dict) and isinstance(versions, dict)
    assert calibration | {"corpus": None} == {"corpus": None, "sequences": 4, "length": 16, "seed": 0}
    assert "auto-round" in versions
    report, plain = (bench.report(digest_of_role(one, "report")) for one in (ours, nearest))
    assert report["calibration_corpus"]["bad"]["not-json"]["count"] == 1
    assert len(report["tensors"]) == 14
    # Per weight, the nearest code has the least error. auto-round reduces the error of a whole block.
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
    assert "permille[workers]" in failed(bench, "quantization", request)


def failed(bench: Bench, kind: str, payload: dict[str, Any]) -> str:
    job = bench.finish(kind, payload)
    assert job.state == "failed"
    assert job.error is not None
    assert job.error["retryable"] is False
    return str(job.error["message"])


def test_a_model_that_changed_is_refused(bench: Bench) -> None:
    mask_of(bench)
    save_model(bench.root / "models" / "tiny", seed=1)
    assert "have changed" in failed(bench, "quantization", {"model_id": bench.model.id})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus_id": None}, "corpus_id"),
        ({"method": "guess"}, "Input tag 'guess'"),
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


def test_a_mask_is_scored_on_sequences_of_at_most_the_models_positions(bench: Bench) -> None:
    assert mask_of(bench, length=512).provenance["length"] == 128


@pytest.mark.parametrize(("kind", "field"), [("mask", "corpus_id"), ("quantization", "evaluation_corpus_id")])
def test_a_corpus_of_which_much_is_broken_is_refused_with_the_numbers(
    bench: Bench, kind: str, field: str
) -> None:
    path = bench.root / "corpora" / "rows.jsonl"
    path.write_text("no json\n" * 300 + path.read_text())
    request = fisher_request(bench) if kind == "mask" else {"model_id": bench.model.id}
    message = failed(bench, kind, request | {field: bench.corpus.id})
    assert "rows are broken" in message and "not-json" in message


def test_a_corpus_outside_the_root_is_refused(bench: Bench) -> None:
    (bench.root / "secret.txt").write_text("secret " * 1000)
    (bench.root / "corpora" / "rows.jsonl").unlink()
    (bench.root / "corpora" / "rows.jsonl").symlink_to(bench.root / "secret.txt")
    assert "below the corpus root" in failed(bench, "mask", fisher_request(bench))


def test_a_damaged_mask_layer_is_refused(bench: Bench) -> None:
    """The error allows another attempt, because the blob may be repaired. The job has only one attempt."""
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


def test_a_stopped_fisher_job_goes_on_after_its_last_shard(bench: Bench) -> None:
    """The work folder keeps the sums of finished shards. The mask equals that of an uninterrupted job."""
    whole = mask_of(bench, sequences=40, length=16)
    job = bench.submit("mask", fisher_request(bench, sequences=40, length=16))
    folder = stop_after(bench, 20)
    assert [path.name.endswith("-1.safetensors") for path in folder.joinpath("fisher").iterdir()] == [True]
    with bench.db.write() as session:
        queue.retry(session, tenant_id=bench.tenant_id, job_id=job.id)
    bench.run_queued()
    resumed = artifact_of(bench, succeeded(bench.read(job)))
    assert digest_of_role(resumed, "mask") == digest_of_role(whole, "mask")
    assert digest_of_role(resumed, "report") == digest_of_role(whole, "report")


def stop_after(bench: Bench, sequences: int) -> Path:
    """Run the queued mask job up to a sequence, then cancel it. Return its work folder."""

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


def test_the_same_mask_gives_the_same_report(bench: Bench) -> None:
    first, second = mask_of(bench), mask_of(bench)
    assert digest_of_role(first, "report") == digest_of_role(second, "report")


@pytest.mark.slow
def test_a_model_with_pickled_weights_and_a_slow_tokenizer_is_built(bench: Bench) -> None:
    write_published(bench.root / "models" / "opt")
    with bench.db.write() as session:
        source = FolderModel(kind="folder", path="opt")
        model = inputs.add_model(session, tenant_id=bench.tenant_id, name="opt", source=source, facts=None)
    opt = dataclasses.replace(bench, model=model)
    mask = {**FISHER, "length": 16, "corpus_id": bench.corpus.id}
    made = made_by(opt, JobKind.BUILD, build_request(opt, mask=mask, evaluation_corpus_id=None))
    package = verify_package(bench.blobs, made.digest)
    assert package.config["model_type"] == "opt"
    assert "tokenizer.json" in package.manifest.files()
