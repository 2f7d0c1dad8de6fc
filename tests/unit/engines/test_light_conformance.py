"""The light engine in the conformance suite: every family and all schemes."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from permille.choices import AdapterKind
from permille.engines.light.decoding import TextPass
from permille.engines.light.engine import LightEngine
from permille.engines.sampling import TokenSampling
from permille.errors import InputError
from permille.package.build import ChosenAdapter
from permille.quantization.types import Scheme
from tests.unit.engines.conformance import SHARING_RULES, Conformance
from tests.unit.engines.tiny import CONFIGS, Tiny, set_values, tiny_batch, tiny_package, variants

# NF4 for every family, and one more scheme.
PACKAGES = [(family, Scheme.NF4) for family in CONFIGS]
PACKAGES += zip(CONFIGS, cycle([Scheme.INT4, Scheme.INT8]), strict=False)


@pytest.fixture(scope="module", params=PACKAGES, ids=str)
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Conformance:
    family, scheme = request.param
    tiny: Tiny = tiny_package(tmp_path_factory.mktemp("blobs"), family, scheme)
    return Conformance(engine=LightEngine(tiny.package), tiny=tiny)


@pytest.mark.parametrize("rule", SHARING_RULES, ids=lambda rule: rule.__name__)
def test_light_engine_conforms(suite: Conformance, rule: Callable[[Conformance], None]) -> None:
    rule(suite)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_package_in_half_precision_conforms(dtype: torch.dtype, tmp_path: Path) -> None:
    """Embeddings and head are stored in 16 bits and converted to float32 during use."""
    tiny = tiny_package(tmp_path, "gemma", dtype=dtype)
    Conformance(engine=LightEngine(tiny.package), tiny=tiny).check()


def test_it_conforms_in_parts_and_with_one_thread(tmp_path: Path) -> None:
    """Every call runs in parts, because 14 tokens are less than two sequences or two variants."""
    tiny = tiny_package(tmp_path, "qwen2")
    engine = LightEngine(tiny.package, threads=1, max_tokens=14)
    Conformance(engine=engine, tiny=tiny).check()


@pytest.mark.parametrize(
    ("family", "kind", "scope"),
    [
        ("llama", AdapterKind.LORA, "all"),
        ("gemma2", AdapterKind.LORA_FA, "attention"),
        ("opt", AdapterKind.LORA, "layers:1"),
        ("gpt_neox", AdapterKind.LORA_FA, "all"),
        ("phi3", AdapterKind.LORA, "all"),
        ("phi3", AdapterKind.LORA_FA, "all"),
    ],
)
def test_adapters_conform(family: str, kind: AdapterKind, scope: str, tmp_path: Path) -> None:
    adapter = ChosenAdapter(kind=kind, rank=4, alpha=8, scope=scope)
    tiny = tiny_package(tmp_path / "nf4", family, adapter=adapter)
    Conformance(engine=LightEngine(tiny.package, max_tokens=14), tiny=tiny).check()
    engine, values_K, ids = LightEngine(tiny.package), variants(tiny.package, 2)[1], np.array([3, 1, 4, 1])
    Conformance(engine=engine, tiny=tiny).check()
    text = TextPass(engine._exact, engine._model, values_K, 8)
    text.next_logits(ids[:3])
    set_values(tiny.package, tiny.reference, values_K)
    expected_D = tiny.reference(torch.from_numpy(ids)[None]).logits[0, -1]
    np.testing.assert_allclose(text.next_logits(ids[3:]), expected_D, atol=1e-4)
    if family == "llama":
        tiny = tiny_package(tmp_path / "int4", family, Scheme.INT4, adapter=adapter)
        rounded = LightEngine(tiny.package, int8=True)
        Conformance(engine=rounded, tiny=tiny, loss_tolerance=0.05).check()


@pytest.mark.parametrize("family", CONFIGS)
def test_int8_activations_conform(family: str, tmp_path: Path) -> None:
    """The tolerance of the losses is larger, because of the 8 bits."""
    tiny = tiny_package(tmp_path, family, Scheme.INT4)
    engine = LightEngine(tiny.package, int8=True)
    assert engine.info()["compute_dtype"] == "int8-activations"
    Conformance(engine=engine, tiny=tiny, loss_tolerance=0.05).check()


def test_int8_activations_conform_in_parts_with_two_threads(tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path, "qwen2", Scheme.INT4)
    whole = LightEngine(tiny.package, int8=True, threads=1)
    parts = LightEngine(tiny.package, int8=True, threads=2, max_tokens=14)
    batch, values_VK = tiny_batch(), variants(tiny.package, 3)
    Conformance(engine=parts, tiny=tiny, loss_tolerance=0.05).check()
    np.testing.assert_allclose(parts.losses(values_VK, batch), whole.losses(values_VK, batch), atol=1e-5)


def test_int8_activations_let_small_perturbations_through(tmp_path: Path) -> None:
    """Sparse values are not rounded, so the difference of two losses is close to that of float32.

    The rest is noise of the layers above, which is small beside the effect of larger steps.
    """
    tiny = tiny_package(tmp_path, "llama", Scheme.INT4)
    batch, values_K = tiny_batch(), tiny.package.values()
    z_K = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), len(values_K))
    both_VK = np.stack([values_K + 0.05 * z_K, values_K - 0.05 * z_K]).astype(np.float32)
    exact, rounded = (
        np.subtract(*LightEngine(tiny.package, int8=int8).losses(both_VK, batch)) for int8 in (False, True)
    )
    assert abs(rounded - exact) <= 0.2 * abs(exact)


@pytest.mark.parametrize("scheme", [Scheme.NF4, Scheme.INT8])
def test_int8_activations_are_for_codes_of_four_bits(scheme: Scheme, tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path, "llama", scheme)
    with pytest.raises(InputError, match=f"need an int4 package .* This one is {scheme}"):
        LightEngine(tiny.package, int8=True)


@pytest.mark.parametrize("scope", ["all", "layers:1"])
def test_int8_activations_leave_text_and_derivatives_in_float32(scope: str, tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path, "llama", Scheme.INT4, scope=scope)
    batch, values_K = tiny_batch(), variants(tiny.package, 2)[1]
    prompt = np.array([3, 1, 4, 1, 5])
    exact, rounded = (LightEngine(tiny.package, int8=int8) for int8 in (False, True))
    assert (exact.losses(values_K[None], batch) != rounded.losses(values_K[None], batch)).all()

    for engine in (rounded, exact):
        engine.losses(values_K[None], batch)  # stored states of losses must not be used for derivatives
    (loss, gradient_K), (same_loss, same_K) = (each.gradient(values_K, batch) for each in (exact, rounded))
    assert loss == same_loss
    np.testing.assert_array_equal(gradient_K, same_K)
    logits = [
        TextPass(engine._exact, engine._model, values_K, 8).next_logits(prompt) for engine in (exact, rounded)
    ]
    np.testing.assert_array_equal(logits[0], logits[1])
    written = [
        list(each.generate(values_K, prompt, TokenSampling(max_new_tokens=8))) for each in (exact, rounded)
    ]
    assert written[0] == written[1]
