"""Memories in 8 bits: nearly the losses of the text itself, on every family."""

from pathlib import Path

import numpy as np
import pytest

from permille.engines import memory
from permille.engines.key_values import KeyValues
from permille.engines.light.engine import LightEngine
from permille.engines.memory import decode_memory, encode_memory, most_positions
from tests.unit.engines.tiny import CONFIGS, tiny_batch, tiny_package, variants

TEXT = np.array([7, 1, 8, 2, 8, 1, 8, 2, 8])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_memory_in_8_bits_has_nearly_the_losses_of_the_text(family: str, tmp_path: Path) -> None:
    tiny, batch = tiny_package(tmp_path, family), tiny_batch()
    engine, values_K = LightEngine(tiny.package), variants(tiny.package, 2)[1]
    known = engine.read(values_K, TEXT)
    stored = decode_memory(tiny.package, None, encode_memory(tiny.package, None, known))
    losses = [engine.after(each).token_losses(values_K, batch).mean() for each in (known, stored)]
    assert abs(losses[1] - losses[0]) <= 0.005


def test_zeros_and_the_largest_number_of_a_head_are_exact(tmp_path: Path) -> None:
    package = tiny_package(tmp_path, "llama").package
    x_SBD = np.zeros((1, 2, 8), np.float32)
    x_SBD[0, 1] = [1.27, -1.27, 0.634, 0, 0.01, 0.006, -0.004, 1e-30]
    known = KeyValues(id_S=np.array([3]), layers=((x_SBD, -x_SBD),) * 2)
    key, value = decode_memory(package, None, encode_memory(package, None, known)).layers[1]
    np.testing.assert_array_equal(key[0, 0], 0)
    np.testing.assert_allclose(key[0, 1], [1.27, -1.27, 0.63, 0, 0.01, 0.01, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(value, -key)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_largest_memory_fits_into_its_bytes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tiny_package(tmp_path, family).package
    known = LightEngine(package).read(package.values(), TEXT)
    monkeypatch.setattr(memory, "MOST_BYTES", known.nbytes)
    assert most_positions(package) == len(TEXT)
    monkeypatch.setattr(memory, "MOST_BYTES", known.nbytes - 1)
    assert most_positions(package) == len(TEXT) - 1
    monkeypatch.setattr(memory, "MOST_BYTES", known.nbytes * memory.MAX_TOKENS)
    assert most_positions(package) == memory.MAX_TOKENS


def test_a_model_that_only_torch_computes_has_a_size_of_its_memory(tmp_path: Path) -> None:
    package = tiny_package(tmp_path, "llama").package
    known = most_positions(package)
    package.config["hidden_act"] = "gelu_fast"  # training asks for the size with every engine
    assert most_positions(package) == known
