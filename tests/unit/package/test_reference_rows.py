"""Tests of a package's reference: it is a part of the package, and readers refuse bad ones."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.package.blobs import BlobFolder
from permille.package.build import write_manifest
from permille.package.reader import Package, verify_package
from permille.package.reference_rows import NAMED_TOKENS, ReferenceRows, read_reference, write_reference
from permille.package.safetensors_io import SafetensorsFile
from permille.training.reference import Reference, make_reference
from tests.unit.engines.tiny import VOCABULARY, tiny_package


class NumberedChat:
    """A chat template with prompts of made-up tokens."""

    def prompt(self, question: str) -> NDArray[np.int64]:
        return np.array([1, 2 + len(question) % 20, 3])

    def stop_ids(self) -> frozenset[int]:
        return frozenset()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    tiny = tiny_package(tmp_path_factory.mktemp("tiny"), "llama").package
    text_NT = np.random.default_rng(0).integers(0, VOCABULARY, (6, 10))
    manifest = make_reference(tiny, text_NT=text_NT, chat=NumberedChat(), made={"corpus": "numbers"})
    return verify_package(tiny.blobs, write_manifest(tiny.blobs, manifest))


def rows_of(package: Package) -> ReferenceRows:
    rows = package.reference_rows()
    assert rows is not None
    return rows


def test_reference_is_part_of_the_package(package: Package) -> None:
    assert package.manifest.provenance["reference"] == {"corpus": "numbers"}
    assert package.manifest.parent() == package.manifest
    rows = rows_of(package)
    assert rows.ids_NT.shape[0] == 6 + 8 + 4
    assert rows.pulls_N.sum() == 3 + 8
    assert rows.chat_N.sum() == 12


def test_base_is_not_pulled(package: Package) -> None:
    from permille.engines.light.engine import LightEngine

    reference, engine, values_K = Reference.of(package), LightEngine(package), package.values()
    assert reference is not None
    for step in range(9):
        batch = reference.pull(step)
        assert abs(float(engine.losses(values_K[None], batch)[0])) < 1e-4
    moved_K = values_K + np.float32(0.3)
    assert engine.losses(moved_K[None], batch)[0] > 1e-3
    assert reference.loss(engine, moved_K) != reference.loss(engine, values_K)


def test_steps_go_round_text_and_chat(package: Package) -> None:
    reference = Reference.of(package)
    assert reference is not None
    # There are 3 texts and 8 chat turns, so the pair of a step repeats after 24 steps.
    first, again, next_ = (reference.pull(step).input_ids_BT for step in (0, 24, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != next_).any()


def test_whole_rows_come_back(package: Package, tmp_path: Path) -> None:
    blobs, rows = BlobFolder(tmp_path), rows_of(package)
    assert rows.named_RS.shape[1] == min(NAMED_TOKENS, VOCABULARY)
    layer = write_reference(blobs, rows)
    found = read_reference(SafetensorsFile(blobs.path(layer.digest)), VOCABULARY, None)
    for name in ReferenceRows.__slots__:
        np.testing.assert_array_equal(getattr(found, name), getattr(rows, name))
