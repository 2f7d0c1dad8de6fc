"""Layers' parts in less memory: the bits of the parts as they were, and one array where there were three."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from permille.engines.dequantization import PackedWeight
from permille.engines.overlay import FixedValues, Overlay, OverlayLinear
from permille.engines.thrift import GatedMlp, InRowBlocks, make_thrifty
from permille.engines.torch_engine import TorchEngine
from permille.quantization import Scheme, quantize
from tests.unit.engines.tiny import tiny_batch, tiny_package

WIDTH, INNER, TOKENS, MASKED = 32, 96, 10, 20
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt", "gemma", "gemma2", "gemma3_text", "gpt_neox")


class Block(nn.Module):
    """As transformers writes it."""

    def __init__(self, overlay: Overlay) -> None:
        super().__init__()
        self.gate_proj = linear(overlay, INNER, WIDTH, 0)
        self.up_proj = linear(overlay, INNER, WIDTH, 1)
        self.down_proj = linear(overlay, WIDTH, INNER, 2)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return product


def linear(overlay: Overlay, rows: int, columns: int, seed: int) -> OverlayLinear:
    rng = np.random.default_rng(seed)
    quantized = quantize(rng.standard_normal((rows, columns)).astype(np.float32), Scheme.INT4, 32)
    mask = np.sort(rng.choice(rows * columns, MASKED, replace=False)).astype(np.uint32)
    weight = PackedWeight(quantized, overlay.device)
    return OverlayLinear(overlay, weight, mask, seed * MASKED, cached=False)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three rows, tiles of a few."""
    torch.manual_seed(0)
    monkeypatch.setattr("permille.engines.thrift._BLOCK", 3 * INNER)
    monkeypatch.setattr("permille.engines.overlay._TILE_WEIGHTS", 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_gated_block_keeps_its_bits(groups: int, dtype: torch.dtype) -> None:
    overlay = Overlay(torch.device("cpu"), dtype)
    block = Block(overlay)
    x, values_GK = torch.randn(groups, TOKENS, WIDTH, dtype=dtype), torch.randn(groups, 3 * MASKED)
    with overlay.using(values_GK):
        expected = block(x)
        for _ in range(2):  # The second time the shared array holds what the first left.
            torch.testing.assert_close(GatedMlp(block, overlay)(x), expected, rtol=0, atol=0)


def test_a_text_keeps_nothing_in_shared_memory() -> None:
    overlay = Overlay(torch.device("cpu"), torch.float32)
    layer = linear(overlay, INNER, WIDTH, 0)
    layer.stand_among(0, INNER)
    fixed, x = FixedValues(torch.randn(MASKED)), torch.randn(2, 1, TOKENS, WIDTH)
    with overlay.using(fixed.value_K[None]):
        assert layer(x[0]).data_ptr() == layer(x[1]).data_ptr()
    with overlay.using(fixed.value_K[None], fixed=fixed):
        first, second = layer(x[0]), layer(x[1])
    assert first.data_ptr() != second.data_ptr()


def test_projections_that_share_memory_do_not_overlap() -> None:
    overlay = Overlay(torch.device("cpu"), torch.float32)
    layers = [linear(overlay, rows, WIDTH, seed) for seed, rows in enumerate((INNER, WIDTH, WIDTH))]
    x, values_1K = torch.randn(1, TOKENS, WIDTH), torch.randn(1, 3 * MASKED)
    with overlay.using(values_1K):
        expected = [layer(x) for layer in layers]
        for layer, before in zip(layers, (0, INNER, INNER + WIDTH), strict=True):
            layer.stand_among(before, INNER + 2 * WIDTH)
        found = [layer(x) for layer in layers]
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)], ids=["layer", "rms"])
def test_a_norm_in_blocks_keeps_its_bits(norm: nn.Module) -> None:
    x = torch.randn(2, 20, WIDTH)
    overlay = Overlay(torch.device("cpu"), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(InRowBlocks(norm, overlay)(x), norm(x), rtol=0, atol=0)


def test_parts_are_changed_where_their_form_is_known(tmp_path: Path) -> None:
    for family, gated in (("llama", 1), ("gemma2", 1), ("opt", 0), ("gpt_neox", 0)):
        model = TorchEngine(tiny_package(tmp_path / family, family).package)._model
        slots = [module for module in model.decoder.modules() if type(module).__name__ == "_Slot"]
        for slot in slots:
            assert sum(isinstance(part, GatedMlp) for part in slot.modules()) == gated
            assert any(isinstance(part, InRowBlocks) for part in slot.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_losses(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts far smaller than a batch: what is cut must be rows that know nothing of each other."""
    package = tiny_package(tmp_path, family).package
    noise_VK = np.random.default_rng(0).standard_normal((3, package.k)).astype(np.float32)
    values_VK = package.values() + np.float32(0.1) * noise_VK
    found = TorchEngine(package).losses(values_VK, tiny_batch())
    monkeypatch.setattr("permille.engines.assembly.make_thrifty", lambda *_: None)
    expected = TorchEngine(package).losses(values_VK, tiny_batch())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_gpu_keeps_its_layers() -> None:
    overlay = Overlay(torch.device("meta"), torch.float32)
    layer = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH)})
    make_thrifty(nn.ModuleList([layer]), overlay)
    assert isinstance(layer["norm"], nn.LayerNorm)


def test_the_first_hidden_states_are_dropped_and_the_losses_stay(tmp_path: Path) -> None:
    package = tiny_package(tmp_path, "llama").package
    engine, values_1K = TorchEngine(package), package.values()[None]
    first = engine.losses(values_1K, tiny_batch())
    np.testing.assert_array_equal(engine.losses(values_1K, tiny_batch()), first)
