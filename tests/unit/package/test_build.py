"""Tests of building a package from a model folder, as notebooks and the last step of a build do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import MaskMethod
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors, table_names
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask, pack_model
from permille.package.limits import MAX_FILE_BYTES
from permille.package.manifest import MaskInfo
from permille.package.reader import Package, verify_package
from permille.quantization import dequantize, quantize
from permille.quantization.tables import code_table
from permille.quantization.types import Scheme
from permille.sensitivity.masks import select_mask
from tests.unit.workers.conftest import save_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def mask(checkpoint: Checkpoint) -> Mapping[str, NDArray[np.uint32]]:
    """Return a random mask of the upper decoder layer. It does not contain tensors of the other layer."""
    return select_mask(checkpoint.weights("layers:1-1"), MaskMethod.RANDOM, 0.05, seed=3)


def chosen(indices: Mapping[str, NDArray[np.uint32]], **how: Any) -> ChosenMask:
    return ChosenMask(**{"indices": indices, "method": "random", "density": "0.05"} | how)


def test_a_package_holds_the_model_and_its_masked_weights(
    checkpoint: Checkpoint, mask: Mapping[str, NDArray[np.uint32]], tmp_path: Path
) -> None:
    blobs = BlobFolder(tmp_path)
    digest = pack_model(
        blobs,
        checkpoint,
        chosen(mask, density=0.05, scope="layers:1-1"),
        Scheme.INT4,
        group_size=128,
        provenance={"made": "by hand"},
    )
    verify_package(blobs, digest)
    package = Package.open(blobs, digest)
    assert [tensor.name for tensor in package.manifest.tensors] == [
        n for n, _ in scoped_tensors(checkpoint.config)
    ]
    k = sum(indices.size for indices in mask.values())
    expected = MaskInfo(method="random", density="0.05", scope="layers:1-1", k=k)
    assert package.manifest.trainable == expected
    assert package.manifest.provenance == {"made": "by hand"}
    masked = [checkpoint.float32(name).reshape(-1)[indices] for name, indices in mask.items()]
    assert np.array_equal(package.values(), np.concatenate(masked))
    for name, _ in scoped_tensors(checkpoint.config):
        coded = quantize(checkpoint.float32(name), Scheme.INT4, 128)
        assert np.array_equal(dequantize(package.quantized(name)), dequantize(coded))
        assert np.array_equal(package.mask(name), mask.get(name, np.empty(0, np.uint32)))
    for name in package.plain_names:
        source = checkpoint.raw(name)
        wanted = code_table(source) if name in table_names(checkpoint.config) else source
        assert np.array_equal(package.plain(name).data, wanted.data)
    assert package.file("tokenizer.json") == (checkpoint.folder / "tokenizer.json").read_bytes()


def test_a_mask_of_a_larger_model_is_refused(
    checkpoint: Checkpoint, mask: Mapping[str, NDArray[np.uint32]], tmp_path: Path
) -> None:
    name = next(iter(mask))
    beyond = np.append(mask[name], np.uint32(checkpoint.float32(name).size))
    with pytest.raises(InputError, match=f"index {beyond[-1]} of .*{name}"):
        pack_model(BlobFolder(tmp_path), checkpoint, chosen({**mask, name: beyond}))


def test_a_file_that_is_too_large_is_refused(mask: Mapping[str, NDArray[np.uint32]], tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    with (tmp_path / "model" / "LICENSE").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InputError, match="LICENSE"):
        pack_model(BlobFolder(tmp_path / "blobs"), Checkpoint(tmp_path / "model"), chosen(mask))
