"""Tests of the scores' file and of the coverage evidence."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from permille.choices import MaskMethod
from permille.digests import digest_of_file
from permille.errors import InputError, PackageError
from permille.package.blobs import BlobFolder
from permille.sensitivity.coverage import curve, mask_report
from permille.sensitivity.masks import select_mask
from permille.sensitivity.scores import (
    Scores,
    load_scores,
    put_scores,
    save_scores,
    zero_scores,
)

SHAPES = (("layers.10.b", (3, 5)), ("layers.2.a", (4, 2)))


def filled() -> Scores:
    scores = zero_scores(SHAPES)
    scores.flat[:] = np.random.default_rng(0).random(scores.flat.size, np.float32) ** 8
    return scores


def test_saved_scores_load_bit_for_bit_in_their_order_here_and_elsewhere(tmp_path: Path) -> None:
    scores, path = filled(), tmp_path / "scores.safetensors"
    save_scores(path, scores)
    loaded = load_scores(path)
    assert list(loaded) == ["layers.10.b", "layers.2.a"]
    assert loaded.shapes == SHAPES
    assert loaded.flat.tobytes() == scores.flat.tobytes()
    assert not loaded.flat.flags.writeable
    theirs = safetensors.numpy.load_file(path)
    assert theirs.keys() == scores.keys()
    assert all(np.array_equal(theirs[name], scores[name]) for name in theirs)
    assert put_scores(BlobFolder(tmp_path / "blobs"), scores) == digest_of_file(path)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same file system", "another one"])
def test_mapped_scores_become_the_same_blob_and_are_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    digest = put_scores(BlobFolder(tmp_path / "memory"), filled())
    monkeypatch.setattr("permille.sensitivity.scores.IN_MEMORY_BYTES", 0)
    scores, blobs = zero_scores(SHAPES, spill_dir=tmp_path / "spill"), BlobFolder(tmp_path / "blobs")
    scores.flat[:] = filled().flat
    if elsewhere:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EXDEV, "another file system")

        monkeypatch.setattr("os.link", refuse)
    assert put_scores(blobs, scores) == digest
    blobs.check(digest)
    assert not any(path.suffix == ".tmp" for path in tmp_path.rglob("*"))
    assert load_scores(blobs.path(digest)).flat.tobytes() == filled().flat.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        scores["layers.2.a"][0, 0] = 1


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    save_scores(path, filled())
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(PackageError):
        load_scores(path)
    safetensors.numpy.save_file({"a": np.zeros(3, np.float32)}, path, metadata={"format": "pt"})
    with pytest.raises((InputError, PackageError)):
        load_scores(path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scores.safetensors"
    save_scores(path, filled())
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_scores(path, zero_scores(SHAPES))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["scores.safetensors"]


def by_sorting(scores: dict[str, NDArray[np.float32]], fraction: float) -> float:
    flat = np.sort(np.concatenate([s.reshape(-1) for s in scores.values()]).astype(np.float64))[::-1]
    return float(flat[: round(fraction * flat.size)].sum() / flat.sum())


def test_curve_is_the_cumulative_normalised_sum_within_its_bins() -> None:
    rng = np.random.default_rng(0)
    scores = {name: rng.lognormal(0, 3, (200, 100)).astype(np.float32) for name in "ab"}
    points = curve(scores)
    assert points[-1] == {"fraction": 1.0, "coverage": 1.0}
    assert [p["coverage"] for p in points] == sorted(p["coverage"] for p in points)
    for point in points:
        if point["fraction"] * 40_000 >= 20:
            assert abs(point["coverage"] - by_sorting(scores, point["fraction"])) < 5e-3


def test_curve_counts_zeros_and_the_extremes_of_float32() -> None:
    score = np.zeros((10, 10), np.float32)
    score[0, 0], score[0, 1] = 3.4e38, 1e-45
    points = curve({"a": score})
    assert points[0]["fraction"] == pytest.approx(0.01)
    assert points[0]["coverage"] == pytest.approx(1)


def test_a_score_of_zero_everywhere_claims_nothing() -> None:
    scores = {"a": np.zeros((10, 10), np.float32)}
    mask = {"a": np.arange(20, dtype=np.uint32)}
    assert mask_report(scores, mask)["coverage"] == 0.2
    assert all(point["coverage"] == point["fraction"] for point in curve(scores))


def test_table_and_whole_are_shares_of_the_score() -> None:
    scores = {"a": np.array([[1, 2, 3, 4]], np.float32), "b": np.array([[0, 30]], np.float32)}
    mask = {"a": np.array([2, 3], np.uint32), "b": np.array([0], np.uint32)}
    report = mask_report(scores, mask)
    assert report["coverage"] == pytest.approx(7 / 40)
    assert [(row["name"], row["count"], row["coverage"], row["score"]) for row in report["tensors"]] == [
        ("a", 2, pytest.approx(0.7), 10.0),
        ("b", 1, 0.0, 30.0),
    ]


def test_report_is_json_without_nan() -> None:
    scores = filled()
    report = mask_report(scores, select_mask(scores, MaskMethod.FISHER, 0.2))
    again = json.loads(json.dumps(report, allow_nan=False))
    assert again == report
    assert (report["k"], report["numel"]) == (5, 23)
    assert report["tensors"][0]["shape"] == [3, 5]


def test_mask_of_other_tensors_or_indices_is_refused() -> None:
    scores = {"a": np.ones((2, 2), np.float32)}
    with pytest.raises(InputError, match="They differ in a, b"):
        mask_report(scores, {"b": np.zeros(1, np.uint32)})
    with pytest.raises(InputError, match="a: expected indices below 4, got 4"):
        mask_report(scores, {"a": np.array([4], np.uint32)})
    with pytest.raises(InputError, match="a has a score that is not a finite"):
        curve({"a": np.array([[np.nan]], np.float32)})
