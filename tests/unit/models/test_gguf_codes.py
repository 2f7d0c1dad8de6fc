"""Tests of a GGUF file's own codes in packages, engines and exported files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from permille.engines.gguf.export import export_gguf
from permille.engines.light.engine import LightEngine
from permille.engines.sampling import TokenSampling
from permille.engines.torch_engine import TorchEngine
from permille.errors import InputError
from permille.models.gguf.codes import KeptModel
from permille.models.gguf.file import GgufFile
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask, pack_model
from permille.package.reader import Package, verify_package
from permille.quantization.gguf_blocks import TYPES
from permille.quantization.types import Scheme
from permille.tensors import Q8_0
from permille.zo.estimators import Batch
from tests.unit.engines.gguf_packages import exported_package
from tests.unit.models.gguf_files import coded_file, converted
from tests.unit.package.tiny import random_mask

EMBEDDING = "model.embed_tokens.weight"


def kept_package(path: Path, folder: Path) -> Package:
    model = KeptModel(converted(path, folder / "model"), path)
    model.check_codes()
    mask = ChosenMask(indices=random_mask(model.config), method="random", density=0.01)
    blobs = BlobFolder(folder / "kept")
    digest = pack_model(blobs, model, mask, Scheme.SOURCE, codes=model.codes)
    return verify_package(blobs, digest)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Package]:
    folder = tmp_path_factory.mktemp("mixed")
    path = coded_file(folder, TYPES)
    return folder, path, kept_package(path, folder)


def differing(first: Path, second: Path) -> list[str]:
    """Return the names of tensors with different types or bytes."""
    ours, theirs = GgufFile(first), GgufFile(second)
    assert ours.tensors.keys() == theirs.tensors.keys()
    return [
        name
        for name, place in ours.tensors.items()
        if place.type is not theirs.tensors[name].type or not np.array_equal(ours.raw(name), theirs.raw(name))
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("name", TYPES)
def test_untouched_state_leaves_as_the_source(name: str, family: str, tmp_path: Path) -> None:
    path = coded_file(tmp_path, (name,), family)
    package = kept_package(path, tmp_path)
    exported = export_gguf(package, None, tmp_path / "out")
    assert (exported.kind.value, exported.kept) == ("source", 1.0)
    assert differing(tmp_path / "out/model.gguf", path) == []


def test_a_personal_value_changes_its_block_alone(mixed: tuple[Path, Path, Package], tmp_path: Path) -> None:
    _, path, package = mixed
    values_K = package.values()
    values_K[::7] += np.float32(0.3)
    exported = export_gguf(package, values_K, tmp_path / "out")
    assert exported.kept > 0.99
    ours, source = GgufFile(tmp_path / "out/model.gguf"), GgufFile(path)
    block_bytes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
    others = 0
    for name in differing(tmp_path / "out/model.gguf", path):
        width = block_bytes[ours.tensors[name].type.name]
        changed = (ours.raw(name) != source.raw(name)).reshape(-1, width).any(axis=1)
        others += int(changed.sum())
    assert 0 < others <= len(values_K[::7])


def test_engines_compute_what_the_converted_folder_computes(mixed: tuple[Path, Path, Package]) -> None:
    folder, _, package = mixed
    reference = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids_1T = torch.arange(5, 37)[None]
    with torch.no_grad():
        expected = float(reference(ids_1T, labels=ids_1T).loss)
    target_1T = np.ones((1, 32), bool)
    target_1T[0, 0] = False
    batch = Batch(input_ids_BT=ids_1T.numpy(), attention_BT=np.ones((1, 32), bool), target_BT=target_1T)
    for engine in (LightEngine(package), TorchEngine(package)):
        found = engine.losses(package.values()[None], batch)[0]
        assert found == pytest.approx(expected, abs=2e-6)
    light, plain = (
        list(engine.generate(package.values(), np.arange(5, 9), TokenSampling(max_new_tokens=12)))
        for engine in (LightEngine(package), TorchEngine(package))
    )
    assert light == plain


def test_codes_are_refused_by_name_where_they_are_not_kept(tmp_path: Path) -> None:
    path = coded_file(tmp_path, ("Q4_1", "Q5_0"))
    model = KeptModel(converted(path, tmp_path / "model"), path)
    with pytest.raises(InputError, match=r"as Q5_0. Scheme source keeps only Q8_0, Q4_0, Q4_1"):
        model.check_codes()


def test_embedding_stays_in_the_codes_of_the_file(mixed: tuple[Path, Path, Package]) -> None:
    _, path, package = mixed
    table = package.plain(EMBEDDING)
    assert table.dtype == Q8_0
    assert np.array_equal(table.data, GgufFile(path).raw("token_embd.weight").reshape(-1))


@pytest.mark.parametrize(("kind", "words"), [("q4_0", "Choose the type source"), ("q4_1", "--type source")])
def test_types_that_a_kept_package_lacks_are_refused(
    kind: str, words: str, mixed: tuple[Path, Path, Package], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        export_gguf(mixed[2], None, tmp_path / "out", kind=kind)
    for other in ("f32", "q8_0"):
        assert export_gguf(mixed[2], None, tmp_path / other, kind=other).size_bytes


def test_other_schemes_keep_no_codes(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama")
    with pytest.raises(InputError, match="keeps no codes of a GGUF file"):
        export_gguf(package, None, tmp_path / "out", kind="source")
