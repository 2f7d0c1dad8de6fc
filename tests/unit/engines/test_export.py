"""Tests of exports to folders that unmodified transformers loads."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from permille.choices import AdapterKind
from permille.engines.executorch.exporting import dual_model
from permille.engines.export import export_transformers
from permille.engines.gguf.export import export_gguf
from permille.engines.light.engine import LightEngine
from permille.engines.peft_export import ADAPTER_FILE, CONFIG_FILE, export_peft
from permille.errors import InputError
from permille.package.build import ChosenAdapter
from permille.quantization.types import Scheme
from permille.zo.estimators import Batch
from tests.unit.engines.tiny import CONFIGS, Tiny, set_values, tiny_package, variants


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return tiny_package(tmp_path / "blobs", "qwen2", dtype=torch.bfloat16)


CODED = [scheme for scheme in Scheme if scheme is not Scheme.SOURCE]  # `SOURCE` needs a GGUF file


@pytest.mark.parametrize(("family", "scheme"), list(zip(CONFIGS, itertools.cycle(CODED), strict=False)))
def test_transformers_computes_the_same_logits(family: str, scheme: Scheme, tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path / "blobs", family, scheme)
    values_K = variants(tiny.package, 2)[1]
    export_transformers(tiny.package, values_K, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.float32
    set_values(tiny.package, tiny.reference, values_K)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, tiny.reference(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "kind", "scope"),
    [("llama", "lora", "all"), ("gpt_neox", "lora-fa", "mlp"), ("opt", "lora", "layers:1")],
)
def test_unmodified_peft_loads_an_adapter(family: str, kind: str, scope: str, tmp_path: Path) -> None:
    """On the exported base model, the adapter gives the logits of the reference and the engine.

    The merged export gives them, too.
    """
    import peft  # the import takes seconds, so not every start of pytest should pay for it

    adapter = ChosenAdapter(kind=AdapterKind(kind), rank=4, alpha=8, scope=scope)
    tiny = tiny_package(tmp_path / "blobs", family, adapter=adapter)
    package, values_K = tiny.package, variants(tiny.package, 2, scale=0.1)[1]
    export_transformers(package, None, tmp_path / "base")
    export_transformers(package, values_K, tmp_path / "merged")
    export_peft(package, values_K, tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [CONFIG_FILE, ADAPTER_FILE]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        alone = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
        assert not [name for name, weight in adapted.named_parameters() if weight.requires_grad]
        set_values(package, tiny.reference, values_K)
        expected = tiny.reference(ids).logits
        torch.testing.assert_close(adapted(ids).logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(merged(ids).logits, expected, rtol=0, atol=1e-5)
    assert (alone - expected).abs().max() > 0.05
    engine = LightEngine(package)
    batch = Batch(input_ids_BT=ids.numpy(), attention_BT=ids.numpy() >= 0, target_BT=ids.numpy() > 0)
    losses = torch.nn.functional.cross_entropy(adapted(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    np.testing.assert_allclose(engine.token_losses(values_K, batch), losses.detach(), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
def test_unmodified_peft_loads_sparse_values(family: str, tmp_path: Path) -> None:
    import peft  # the import takes seconds, so not every start of pytest should pay for it

    tiny = tiny_package(tmp_path / "blobs", family)
    package, values_K = tiny.package, variants(tiny.package, 2, scale=0.1)[1]
    export_transformers(package, None, tmp_path / "base")
    export_peft(package, values_K, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        alone = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
        set_values(package, tiny.reference, values_K)
        expected = tiny.reference(ids).logits
        torch.testing.assert_close(adapted(ids).logits, expected, rtol=0, atol=1e-5)
    assert (alone - expected).abs().max() > 0.01


def test_formats_that_a_package_has_no_numbers_for_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no change to export as an adapter"):
        export_peft(tiny.package, None, tmp_path / "out")
    adapter = ChosenAdapter(kind=AdapterKind.LORA_FA, rank=4, alpha=8)
    package = tiny_package(tmp_path / "adapter", "llama", adapter=adapter).package
    with pytest.raises(InputError, match="Export it as lora or peft"):
        export_gguf(package, None, tmp_path / "out", kind="f16")
    with pytest.raises(InputError, match="needs a package with a mask, and this one has an adapter"):
        dual_model(package)
    assert not (tmp_path / "out").exists()


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
    with pytest.raises(InputError, match="is a file"):
        export_transformers(tiny.package, None, tmp_path / "out" / "config.json")
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == before


def test_a_failed_export_leaves_nothing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("permille.engines.export.write_float32", full)
    with pytest.raises(OSError, match="No space"):
        export_transformers(tiny.package, None, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["blobs"]


def test_values_that_are_wrong_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    values_K = tiny.package.values()
    broken_K = values_K.copy()
    broken_K[3] = np.nan
    wrongs: list[Any] = [values_K[:-1], values_K.astype(np.float64), broken_K]
    for wrong in wrongs:
        with pytest.raises(InputError, match=r"expected|NaN or infinity"):
            export_transformers(tiny.package, wrong, tmp_path / "out")
