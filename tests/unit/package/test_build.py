"""A package of a model folder: what a notebook calls, and the last step of a build."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.build import pack_model
from permille.package.limits import MAX_FILE_BYTES
from permille.package.reader import Package, verify_package
from permille.quantization import Scheme, dequantize, quantize
from permille.sensitivity.masks import MaskMethod, select_mask
from tests.unit.workers.conftest import save_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def mask(checkpoint: Checkpoint) -> Mapping[str, NDArray[np.uint32]]:
    """A random mask of the upper block; tensors of the other are not named."""
    return select_mask(checkpoint.weights("layers:1-1"), MaskMethod.RANDOM, 0.05, seed=3)


@pytest.mark.parametrize("mask_aware", [True, False])
def test_a_package_holds_the_model_and_its_masked_weights(
    checkpoint: Checkpoint, mask: Mapping[str, NDArray[np.uint32]], tmp_path: Path, mask_aware: bool
) -> None:
    blobs = BlobFolder(tmp_path)
    digest = pack_model(
        blobs,
        checkpoint,
        mask,
        method="random",
        density=0.05,
        scope="layers:1-1",
        scheme=Scheme.INT4,
        group_size=128,
        mask_aware=mask_aware,
        provenance={"made": "by hand"},
    )
    verify_package(blobs, digest)
    package = Package.open(blobs, digest)
    assert [tensor.name for tensor in package.manifest.tensors] == [
        n for n, _ in scoped_tensors(checkpoint.config)
    ]
    assert package.manifest.mask.density == "0.05"
    assert package.manifest.provenance == {"made": "by hand"}
    masked = [checkpoint.float32(name).reshape(-1)[indices] for name, indices in mask.items()]
    assert np.array_equal(package.values(), np.concatenate(masked))
    for name, shape in scoped_tensors(checkpoint.config):
        keep = np.zeros(shape, dtype=np.bool_)
        keep.reshape(-1)[mask.get(name, np.empty(0, np.uint32))] = True
        expected = quantize(checkpoint.float32(name), Scheme.INT4, 128, keep if mask_aware else None)
        assert np.array_equal(dequantize(package.quantized(name)), dequantize(expected))
        assert np.array_equal(package.mask(name), mask.get(name, np.empty(0, np.uint32)))
    for name in package.plain_names:
        assert np.array_equal(package.plain(name).data, checkpoint.raw(name).data)
    assert package.file("tokenizer.json") == (checkpoint.folder / "tokenizer.json").read_bytes()


def test_the_same_inputs_have_the_same_digest(
    checkpoint: Checkpoint, mask: Mapping[str, NDArray[np.uint32]], tmp_path: Path
) -> None:
    digests = {
        pack_model(BlobFolder(tmp_path / name), checkpoint, mask, method="random", density="0.05")
        for name in ("one", "two")
    }
    assert len(digests) == 1


def test_a_file_that_is_too_large_is_refused(mask: Mapping[str, NDArray[np.uint32]], tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    with (tmp_path / "model" / "LICENSE").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InputError, match="LICENSE"):
        pack_model(
            BlobFolder(tmp_path / "blobs"),
            Checkpoint(tmp_path / "model"),
            mask,
            method="random",
            density=0.05,
        )


def test_measurements_of_a_models_folder_are_not_taken_for_ours(
    mask: Mapping[str, NDArray[np.uint32]], tmp_path: Path
) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "model" / "measurements.json").write_text('{"error_of_g": 0}')
    blobs = BlobFolder(tmp_path / "blobs")
    digest = pack_model(blobs, Checkpoint(tmp_path / "model"), mask, method="random", density=0.05)
    assert Package.open(blobs, digest).measurements() is None


def test_directions_are_packed_beside_the_mask(
    checkpoint: Checkpoint, mask: Mapping[str, NDArray[np.uint32]], tmp_path: Path
) -> None:
    k = sum(indices.size for indices in mask.values())
    exponents, basis = np.zeros(k, np.int8), np.ones((k, 2), np.int8)
    blobs = BlobFolder(tmp_path)
    digest = pack_model(
        blobs, checkpoint, mask, method="random", density=0.05, exponents=exponents, basis=basis
    )
    package = Package.open(blobs, digest)
    assert np.array_equal(package.basis(), basis) and np.array_equal(package.exponents(), exponents)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        pack_model(blobs, checkpoint, mask, method="random", density=0.05, basis=basis[1:])
