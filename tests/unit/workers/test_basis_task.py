"""The basis job and packages with directions, on a tiny random model."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.models.loading import FileTokenizer
from permille.package.limits import Role
from permille.package.reader import Package, verify_package
from permille.sensitivity import gradients
from permille.sensitivity.basis import fisher_exponents
from permille.sensitivity.scores import load_scores
from permille.store import results
from permille.store.tables import Basis, Mask
from tests.packages import sentences
from tests.unit.workers.conftest import Bench, save_model
from tests.unit.workers.test_tasks import (
    build_payload,
    failed,
    mask_of,
    package_of,
    quantization_of,
    succeeded,
)

OPTIONS = {"sequences": 16, "length": 16, "rank": 4}


def basis_of(bench: Bench, mask: Mask, **options: Any) -> Basis:
    payload = {"mask_id": mask.id, "corpus_id": bench.corpus.id, **OPTIONS, **options}
    job = succeeded(bench.finish("basis", payload))
    with bench.db.read() as session:
        return results.get_basis(session, tenant_id=bench.tenant_id, basis_id=str(job.result_id))


def test_a_basis_is_learned_and_measured_on_sequences_that_were_left_out(bench: Bench) -> None:
    mask = mask_of(bench)
    basis = basis_of(bench, mask)
    assert (basis.k, basis.mask_id, basis.model_id) == (mask.k, mask.id, bench.model.id)
    assert basis.options == {**OPTIONS, "seed": 0}
    report = bench.report(basis.report_digest)
    assert (report["learned_from"], report["left_out"], report["left_out_note"]) == (14, 2, None)
    assert [row["rank"] for row in report["captured"]] == [1, 2, 4]
    shares = [row["of_a_sequence"] for row in report["captured"]]
    assert shares == sorted(shares) and shares[-1] > 2 * report["captured"][-1]["of_random_columns"]
    assert report["corpus"]["bad"]["not-json"]["count"] == 1
    provenance = basis.provenance
    assert provenance["mask"] == mask.mask_digest
    assert provenance["corpus"]["digest"].startswith("sha256:")
    assert basis.size_bytes == bench.blobs.size(basis.basis_digest)


def test_no_text_is_both_learned_from_and_left_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text has more than one window, so windows that are left out one by one would share texts."""
    mask, seen = mask_of(bench), []
    texts = [" ".join([word] * 40) for word in "abcdefghijklmnopqrstuvwx"]
    rows(bench, texts)
    original = gradients.masked_gradients

    def spy(model: Any, tokens_NT: NDArray[np.int64], *args: Any, **kwargs: Any) -> NDArray[np.float32]:
        seen.append(tokens_NT)
        return original(model, tokens_NT, *args, **kwargs)

    monkeypatch.setattr(gradients, "masked_gradients", spy)
    basis_of(bench, mask)
    (tokens_NT,) = seen
    tokenizer = FileTokenizer(bench.root / "models" / "tiny")
    kept = {token for number, text in enumerate(texts) if number % 8 != 7 for token in tokenizer.encode(text)}
    alone = {token for number in (7, 15, 23) for token in tokenizer.encode(texts[number])} - kept
    assert alone
    assert not alone & set(tokens_NT[:14].reshape(-1).tolist())
    assert all(alone & set(row) for row in tokens_NT[14:].tolist()) and len(tokens_NT) == 16


@pytest.mark.parametrize(
    ("texts", "left_out", "note"),
    [
        ([" ".join(sentences(200, seed=2))], 0, "holds no sequence"),
        (["a"] * 7 + [" ".join(sentences(200, seed=2))], 0, "too few texts"),
        ([" ".join(sentences(50, seed=2)), *["a"] * 6, " ".join(["the cat"] * 5)], 1, "less than 2"),
    ],
)
def test_too_few_texts_to_leave_some_out_are_said(
    bench: Bench, texts: list[str], left_out: int, note: str
) -> None:
    mask = mask_of(bench)
    rows(bench, texts)
    report = bench.report(basis_of(bench, mask).report_digest)
    assert (report["learned_from"], report["left_out"]) == (14, left_out)
    assert note in report["left_out_note"]
    assert bool(report["captured"]) == bool(left_out)


def rows(bench: Bench, texts: list[str]) -> None:
    """Put other texts into the bench's corpus."""
    path = bench.root / "corpora" / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))


def test_a_package_carries_basis_and_exponents_and_says_from_which_corpus(bench: Bench) -> None:
    mask = mask_of(bench)
    basis, quantization = basis_of(bench, mask), quantization_of(bench)
    parts = {"mask_id": mask.id, "quantization_id": quantization.id}
    bare = package_of(bench, bench.finish("package", parts))
    payload = {**parts, "basis_id": basis.id, "fisher_exponents": True}
    row = package_of(bench, bench.finish("package", payload))
    assert verify_package(bench.blobs, row.digest).k == mask.k
    package, without = Package.open(bench.blobs, row.digest), Package.open(bench.blobs, bare.digest)
    learned, exponents = package.basis(), package.exponents()
    assert learned is not None and learned.shape == (mask.k, 4)
    scores = load_scores(bench.blobs.path(str(mask.scores_digest)))
    masked = [scores[t.name].reshape(-1)[package.mask(t.name)] for t in package.manifest.tensors]
    assert exponents is not None
    assert np.array_equal(exponents, fisher_exponents(np.concatenate(masked)))
    assert package.manifest.provenance["basis"] == basis.provenance
    assert without.basis() is None and "basis" not in without.manifest.provenance
    with bench.db.read() as session:
        served = {blob.digest for blob in results.list_package_blobs(session, package=row)}
    assert package.manifest.layer(Role.BASIS).digest == basis.basis_digest in served


def test_a_build_learns_the_basis_of_its_own_mask(bench: Bench) -> None:
    options = {"corpus_id": bench.corpus.id, **OPTIONS}
    payload = build_payload(bench, basis=options, fisher_exponents=True, evaluation_corpus_id=None)
    row = package_of(bench, bench.finish("build", payload))
    package = Package.open(bench.blobs, row.digest)
    assert (package.basis_rank, package.exponents() is not None) == (4, True)


def test_a_basis_of_another_mask_is_refused(bench: Bench) -> None:
    basis = basis_of(bench, mask_of(bench))
    other = mask_of(bench, density=0.02)
    payload = {"mask_id": other.id, "quantization_id": quantization_of(bench).id, "basis_id": basis.id}
    assert "expected a basis of" in failed(bench, "package", payload)


def test_exponents_of_a_mask_without_scores_are_refused(bench: Bench) -> None:
    mask = mask_of(bench, method="random", corpus_id=None, sequences=None, length=None)
    payload = {"mask_id": mask.id, "quantization_id": quantization_of(bench).id, "fisher_exponents": True}
    assert "scores" in failed(bench, "package", payload)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 15}, "a rank from 1 to 14"),
        ({"mask_id": "mask_none"}, "no mask"),
        ({"corpus_id": "corpus_none"}, "no corpus"),
        ({"sequences": 100_000}, "sequences"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_bases_that_cannot_be_learned_fail_with_the_reason(
    bench: Bench, changes: dict[str, Any], message: str
) -> None:
    mask = mask_of(bench)
    payload = {"mask_id": mask.id, "corpus_id": bench.corpus.id, **OPTIONS, **changes}
    assert message in failed(bench, "basis", payload)


def test_a_model_that_changed_since_the_mask_is_refused(bench: Bench) -> None:
    mask = mask_of(bench)
    save_model(bench.root / "models" / "tiny", seed=1)
    payload = {"mask_id": mask.id, "corpus_id": bench.corpus.id, **OPTIONS}
    assert "as they were" in failed(bench, "basis", payload)
