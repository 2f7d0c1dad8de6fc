"""The light engine in the conformance suite: every family, both schemes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from permille.engines.light_engine import LightEngine
from permille.quantization import Scheme
from tests.unit.engines.conformance import RULES, Conformance
from tests.unit.engines.tiny import CONFIGS, Tiny, tiny_package


@pytest.fixture(scope="module", params=[(family, scheme) for family in CONFIGS for scheme in Scheme], ids=str)
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Conformance:
    family, scheme = request.param
    tiny: Tiny = tiny_package(tmp_path_factory.mktemp("blobs"), family, scheme)
    return Conformance(engine=LightEngine(tiny.package, cache_bytes=0), tiny=tiny)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_light_engine_conforms(suite: Conformance, rule: Callable[[Conformance], None]) -> None:
    rule(suite)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_package_in_half_precision_conforms(dtype: torch.dtype, tmp_path: Path) -> None:
    """Embeddings and head are stored in 16 bits and widened where they are used."""
    tiny = tiny_package(tmp_path, "gemma", dtype=dtype)
    Conformance(engine=LightEngine(tiny.package), tiny=tiny).check()


def test_it_conforms_in_parts_with_kept_weights_and_one_thread(tmp_path: Path) -> None:
    """Every call is cut: 14 tokens are less than two sequences, and less than two variants."""
    tiny = tiny_package(tmp_path, "qwen2")
    engine = LightEngine(tiny.package, threads=1, max_tokens=14, cache_bytes=1 << 20)
    Conformance(engine=engine, tiny=tiny).check()
