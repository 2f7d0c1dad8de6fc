"""What is shared below and above the first masked layer, and kept: the same losses, to the bit."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.light.engine import LightEngine
from permille.engines.overlay import OverlayLinear
from permille.engines.prefix_cache import PrefixCache
from permille.engines.torch_engine import TorchEngine
from permille.zo.estimators import Batch
from tests.unit.engines.conformance import Conformance
from tests.unit.engines.test_overlay import counted
from tests.unit.engines.tiny import CONFIGS, Tiny, tiny_batch, tiny_package, variants

LAYERS = 4
SCOPES = {
    "llama": "layers:2-",
    "opt": "layers:1-2",
    "gemma2": "layers:3",
    "gemma3_text": "layers:2-3",
    "gpt_neox": "layers:2-",
    "mistral": "layers:1-",
}
FIRST = {"llama": 2, "opt": 1, "gemma2": 3, "gemma3_text": 2, "gpt_neox": 2, "mistral": 1}


def upper(folder: Path, family: str) -> Tiny:
    return tiny_package(folder, family, scope=SCOPES[family], layers=LAYERS)


@pytest.fixture(scope="module", params=list(SCOPES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def tiny(family: str, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return upper(tmp_path_factory.mktemp("blobs"), family)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return upper(tmp_path_factory.mktemp("blobs"), "llama")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_from_a_warm_cache_have_the_bits_of_those_without(tiny: Tiny, dtype: str) -> None:
    values_VK, batch = variants(tiny.package, 3), tiny_batch()
    plain = TorchEngine(tiny.package, compute_dtype=dtype).losses(values_VK, batch)
    cache = PrefixCache(1 << 20)
    engine = TorchEngine(tiny.package, compute_dtype=dtype, prefix_cache=cache)
    for hits in (0, 3, 6):
        np.testing.assert_array_equal(engine.losses(values_VK, batch), plain)
        assert cache.counters().hits == hits
    assert cache.counters().misses == 3
    assert cache.counters().fill_s > 0


def test_it_conforms_with_a_cache(tiny: Tiny) -> None:
    Conformance(engine=TorchEngine(tiny.package, prefix_cache=PrefixCache(1 << 20)), tiny=tiny).check()


def test_layers_below_the_first_masked_one_do_not_run_again(
    tiny: Tiny, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine(tiny.package, prefix_cache=PrefixCache(1 << 20))
    calls = counted(monkeypatch, OverlayLinear, "forward")
    a_layer = len(tiny.package.manifest.tensors) // LAYERS
    values_VK, batch = variants(tiny.package, 3), tiny_batch()
    expected = []
    for layers in (LAYERS, LAYERS - FIRST[family]):
        engine.losses(values_VK, batch)
        expected.append(layers * a_layer)
        assert len(calls) == sum(expected)
    engine.directional_derivatives(values_VK[0], values_VK, batch)
    assert len(calls) == sum(expected) + expected[-1]


def test_derivatives_from_a_warm_cache_have_the_bits_of_those_without(tiny: Tiny) -> None:
    values_K, batch = tiny.package.values(), tiny_batch()
    z_QK = np.random.default_rng(0).standard_normal((3, len(values_K))).astype(np.float32)
    plain_loss, plain_Q = TorchEngine(tiny.package).directional_derivatives(values_K, z_QK, batch)
    engine = TorchEngine(tiny.package, prefix_cache=PrefixCache(1 << 20))
    for _ in range(2):
        loss, got_Q = engine.directional_derivatives(values_K, z_QK, batch)
        assert loss == plain_loss
        np.testing.assert_array_equal(got_Q, plain_Q)


def rows(batch: Batch, chosen: list[int]) -> Batch:
    return Batch(
        input_ids_BT=batch.input_ids_BT[chosen],
        attention_BT=batch.attention_BT[chosen],
        target_BT=batch.target_BT[chosen],
    )


def test_rows_that_are_kept_and_rows_that_are_not_go_together(tiny: Tiny) -> None:
    batch = tiny_batch(lengths=(12, 7, 9, 12, 5))
    values_VK = variants(tiny.package, 2)
    plain = TorchEngine(tiny.package).losses(values_VK, batch)
    cache = PrefixCache(1 << 20)
    engine = TorchEngine(tiny.package, prefix_cache=cache)
    engine.losses(values_VK, rows(batch, [3, 1]))
    np.testing.assert_allclose(engine.losses(values_VK, batch), plain, rtol=0, atol=1e-5)
    assert (cache.counters().hits, cache.counters().misses) == (2, 5)


@pytest.mark.parametrize("make", [TorchEngine, LightEngine])
def test_rows_computed_alone_have_the_same_bits_whatever_they_were_met_with(
    llama: Tiny, make: type[TorchEngine] | type[LightEngine]
) -> None:
    batch, values_VK = tiny_batch(lengths=(12, 7, 9, 12, 5)), variants(llama.package, 2)
    first = make(llama.package, prefix_cache=PrefixCache(1 << 20, rows_alone=True))
    expected = first.losses(values_VK, batch)
    second = make(llama.package, prefix_cache=PrefixCache(1 << 20, rows_alone=True))
    for met in ([4], [0, 3, 1], [2]):
        second.losses(values_VK, rows(batch, met))
    np.testing.assert_array_equal(second.losses(values_VK, batch), expected)
    plain = make(llama.package).losses(values_VK, batch)
    np.testing.assert_allclose(expected, plain, rtol=0, atol=1e-5)


def test_missing_rows_go_together_or_one_by_one() -> None:
    assert PrefixCache(1).together([2, 5]) == [[2, 5]]
    assert PrefixCache(1, rows_alone=True).together([2, 5]) == [[2], [5]]
    assert PrefixCache(1).together([]) == []


@pytest.mark.parametrize("damage", ["gone", "changed", "cut"])
def test_a_spilled_row_that_is_damaged_is_computed_again(llama: Tiny, damage: str, tmp_path: Path) -> None:
    values_VK, batch = variants(llama.package, 2), tiny_batch()
    plain = TorchEngine(llama.package).losses(values_VK, batch)
    cache = PrefixCache(0, folder=tmp_path, disk_bytes=1 << 20)
    engine = TorchEngine(llama.package, prefix_cache=cache)
    np.testing.assert_array_equal(engine.losses(values_VK, batch), plain)
    np.testing.assert_array_equal(engine.losses(values_VK, batch), plain)
    assert cache.counters().hits == 3
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        path.unlink()
        if damage != "gone":
            path.write_bytes(content[:-4] + (b"\0\0\0\0" if damage == "changed" else b""))
    np.testing.assert_array_equal(engine.losses(values_VK, batch), plain)
    assert (cache.counters().hits, cache.counters().misses, cache.counters().rejected) == (3, 6, 3)


def test_a_cache_too_small_for_a_row_changes_nothing(llama: Tiny) -> None:
    values_VK, batch = variants(llama.package, 2), tiny_batch()
    plain = TorchEngine(llama.package).losses(values_VK, batch)
    engine = TorchEngine(llama.package, prefix_cache=PrefixCache(10))
    for _ in range(2):
        np.testing.assert_array_equal(engine.losses(values_VK, batch), plain)


def test_engines_of_another_dtype_or_package_share_no_entries(llama: Tiny, tmp_path: Path) -> None:
    cache, batch = PrefixCache(1 << 20), tiny_batch()
    other = upper(tmp_path, "mistral")
    for package, dtype in (
        (llama.package, "float32"),
        (llama.package, "bfloat16"),
        (other.package, "float32"),
    ):
        values_VK = package.values()[None]
        shared = TorchEngine(package, compute_dtype=dtype, prefix_cache=cache).losses(values_VK, batch)
        alone = TorchEngine(package, compute_dtype=dtype).losses(values_VK, batch)
        np.testing.assert_array_equal(shared, alone)
    assert cache.counters().hits == 0


def test_a_mask_of_the_first_layer_keeps_nothing(tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path, "llama")
    cache = PrefixCache(1 << 20)
    TorchEngine(tiny.package, prefix_cache=cache).losses(tiny.package.values()[None], tiny_batch())
    assert cache.counters().memory_bytes == 0


def split_variants(tiny: Tiny) -> NDArray[np.float32]:
    """Two perturbations of the lower half of the values, three of the upper half under each; one twice."""
    values_VK = np.repeat(tiny.package.values()[None], 7, axis=0)
    noise = np.random.default_rng(0).standard_normal((7, values_VK.shape[1])).astype(np.float32)
    half = sum(tiny.package.counts[: len(tiny.package.counts) // 2])
    noise[:, :half] = noise[[0, 0, 0, 1, 1, 1, 1], :half]
    noise[6] = noise[4]
    return values_VK + np.float32(0.02) * noise


@pytest.mark.parametrize("family", CONFIGS)
def test_variants_that_share_their_lower_layers_have_their_own_losses(family: str, tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path, family)
    engine, batch = TorchEngine(tiny.package), tiny_batch()
    values_VK = split_variants(tiny)
    got = engine.losses(values_VK, batch)
    alone = [engine.losses(values_K[None], batch)[0] for values_K in values_VK]
    np.testing.assert_allclose(got, alone, rtol=0, atol=1e-5)
    assert got[6] == got[4]
    assert len(set(got.tolist())) == 6


def test_a_layer_runs_for_the_variants_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_package(tmp_path, "llama")
    engine, batch = TorchEngine(tiny.package), tiny_batch()
    seen: list[int] = []
    original = OverlayLinear.forward

    def noting(self: OverlayLinear, x: object) -> object:
        seen.append(len(x))  # type: ignore[arg-type]
        return original(self, x)  # type: ignore[arg-type]

    monkeypatch.setattr(OverlayLinear, "forward", noting)
    engine.losses(split_variants(tiny), batch)
    assert seen == [2] * 7 + [6] * 7
