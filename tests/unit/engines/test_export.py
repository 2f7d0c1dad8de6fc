"""A package as a folder that unmodified transformers loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from permille.engines.export import ExportDtype, export_transformers
from permille.errors import InputError
from permille.quantization.types import Scheme
from tests.unit.engines.tiny import CONFIGS, Tiny, set_values, tiny_package, variants


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return tiny_package(tmp_path / "blobs", "qwen2", dtype=torch.bfloat16)


@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_computes_the_same_logits(family: str, tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path / "blobs", family, Scheme.INT4)
    values_K = variants(tiny.package, 2)[1]
    export_transformers(tiny.package, values_K, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.float32
    set_values(tiny.package, tiny.reference, values_K)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, tiny.reference(ids).logits, rtol=0, atol=1e-5)


def test_the_models_dtype_is_torchs_rounding(tiny: Tiny, tmp_path: Path) -> None:
    values_K = variants(tiny.package, 2)[1]
    export_transformers(tiny.package, values_K, tmp_path / "exact")
    export_transformers(tiny.package, values_K, tmp_path / "small", dtype=ExportDtype.MODEL)
    exact, small = (load_file(tmp_path / name / "model.safetensors") for name in ("exact", "small"))
    assert exact.keys() == small.keys()
    for name, tensor in exact.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(small[name], tensor.bfloat16())


def test_an_export_has_nothing_of_the_quantization_and_is_its_users_alone(tiny: Tiny, tmp_path: Path) -> None:
    export_transformers(tiny.package, None, tmp_path / "out")
    export_transformers(tiny.package, tiny.package.values(), tmp_path / "same")
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "same" / "model.safetensors").read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_an_empty_folder_is_used_and_a_full_one_refused(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_transformers(tiny.package, None, tmp_path / "out")
    before = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    with pytest.raises(InputError, match="holds files"):
        export_transformers(tiny.package, None, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == before


def test_a_failed_export_leaves_nothing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("permille.engines.export._write_weights", full)
    with pytest.raises(OSError, match="No space"):
        export_transformers(tiny.package, None, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["blobs"]


def test_values_that_are_wrong_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    values_K = tiny.package.values()
    broken_K = values_K.copy()
    broken_K[3] = np.nan
    wrongs: list[Any] = [values_K[:-1], values_K.astype(np.float64), broken_K]
    for wrong in wrongs:
        with pytest.raises(InputError, match="expected"):
            export_transformers(tiny.package, wrong, tmp_path / "out")
