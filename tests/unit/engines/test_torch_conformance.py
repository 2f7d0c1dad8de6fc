"""The torch engine in the conformance suite: every family with one scheme, on every device of this machine.

The tiny models' rows are not multiples of NF4's block size. One model is wider, for bitsandbytes.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from permille.choices import AdapterKind
from permille.engines import coded_layers
from permille.engines.torch_engine import TorchEngine
from permille.package.build import ChosenAdapter
from permille.quantization.types import Scheme
from tests.unit.engines.conformance import SHARING_RULES, Conformance
from tests.unit.engines.tiny import CONFIGS, Tiny, tiny_package

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


# Scheme `SOURCE` needs a GGUF file. Its tests are in tests/unit/models.
CODED = [scheme for scheme in Scheme if scheme is not Scheme.SOURCE]
PACKAGES = list(zip(CONFIGS, itertools.cycle(CODED), strict=False))


@pytest.fixture(scope="module", params=PACKAGES, ids=str)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, scheme = request.param
    return tiny_package(tmp_path_factory.mktemp("blobs"), family, scheme)


@pytest.fixture(scope="module", params=DEVICES)
def suite(request: pytest.FixtureRequest, tiny: Tiny) -> Conformance:
    return Conformance(engine=TorchEngine(tiny.package, device=request.param), tiny=tiny)


@pytest.mark.parametrize("rule", SHARING_RULES, ids=lambda rule: rule.__name__)
def test_torch_engine_conforms(suite: Conformance, rule: Callable[[Conformance], None]) -> None:
    rule(suite)


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_conforms_within_its_tolerance(device: str, tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path, "llama")
    engine = TorchEngine(tiny.package, device=device, compute_dtype="bfloat16")
    Conformance(engine=engine, tiny=tiny, loss_tolerance=0.1, derivative_tolerance=0.1).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_bitsandbytes_conform(device: str, dtype: str, tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path, "llama", sizes={"hidden_size": 64, "intermediate_size": 128})
    engine = TorchEngine(tiny.package, device=device, compute_dtype=dtype)
    tolerances = {"loss_tolerance": 0.1, "derivative_tolerance": 0.1} if dtype == "bfloat16" else {}
    Conformance(engine=engine, tiny=tiny, **tolerances).check()


@pytest.mark.parametrize("scheme", [Scheme.INT4, pytest.param(Scheme.NF4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", DEVICES)
def test_it_conforms_in_parts(
    device: str, scheme: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call runs in parts, because 14 tokens are less than two sequences or two variants.

    Every matrix is decoded in parts, too.
    """
    monkeypatch.setattr(coded_layers, "_TILE_WEIGHTS", 7 * 32)
    monkeypatch.setattr(coded_layers, "_PRODUCTS", 100)
    tiny = tiny_package(tmp_path, "qwen2", scheme)
    suite = Conformance(engine=TorchEngine(tiny.package, device=device, max_tokens=14), tiny=tiny)
    suite.check()
    suite.what_variants_agree_in_is_computed_once()


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_conform(device: str, tmp_path: Path) -> None:
    for family, kind in (("llama", AdapterKind.LORA), ("gpt_neox", AdapterKind.LORA_FA)):
        adapter = ChosenAdapter(kind=kind, rank=4, alpha=8, scope="layers:1")
        tiny = tiny_package(tmp_path / family, family, adapter=adapter)
        suite = Conformance(engine=TorchEngine(tiny.package, device=device), tiny=tiny)
        suite.check()
        suite.what_variants_agree_in_is_computed_once()
    engine = TorchEngine(tiny.package, device=device, compute_dtype="bfloat16")
    Conformance(engine=engine, tiny=tiny, loss_tolerance=0.1, derivative_tolerance=0.1).check()


@pytest.mark.parametrize("device", DEVICES)
def test_a_package_in_bfloat16_conforms(device: str, tmp_path: Path) -> None:
    """Embeddings, head and norms are stored in bfloat16 and used in float32."""
    tiny = tiny_package(tmp_path, "gemma", dtype=torch.bfloat16)
    Conformance(engine=TorchEngine(tiny.package, device=device), tiny=tiny).check()
