"""Texts that begin with stored keys and values, on every family: as if the engine had read the beginning."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.interface import Engine, remembering
from permille.engines.key_values import KeyValues
from permille.engines.light.decoding import TextPass
from permille.engines.light.engine import LightEngine
from permille.engines.sampling import TokenSampling
from permille.engines.torch_engine import TorchEngine
from permille.errors import InputError
from permille.quantization.types import Scheme
from permille.zo.estimators import Batch
from tests.unit.engines.tiny import CONFIGS, POSITIONS, rows_of, tiny_batch, tiny_package, variants

# Longer than the windows of the tiny models, which have 5 positions.
BEGINNING = np.array([7, 1, 8, 2, 8, 1, 8, 2, 8])
PROMPT = np.array([3, 1, 4, 1, 5])


def _after_beginning(batch: Batch) -> Batch:
    """Return the rows with the beginning before each, without targets in it."""
    rows = len(batch.input_ids_BT)
    return Batch(
        input_ids_BT=np.hstack([np.tile(BEGINNING, (rows, 1)), batch.input_ids_BT]),
        attention_BT=np.hstack([np.ones((rows, len(BEGINNING)), np.bool_), batch.attention_BT]),
        target_BT=np.hstack([np.zeros((rows, len(BEGINNING)), np.bool_), batch.target_BT]),
    )


def _greedy(tokens: int) -> TokenSampling:
    return TokenSampling(max_new_tokens=tokens)


def _logits(
    engine: LightEngine, values_K: NDArray[np.float32], ids: NDArray[np.int64]
) -> NDArray[np.float32]:
    return TextPass(engine._exact, engine._model, values_K, len(ids), engine._after).next_logits(ids)


@pytest.mark.parametrize("family", CONFIGS)
def test_losses_and_text_are_those_of_the_whole_text(family: str, tmp_path: Path) -> None:
    tiny, batch = tiny_package(tmp_path, family), tiny_batch()
    values_VK = variants(tiny.package, 3)
    engine = LightEngine(tiny.package)
    known = engine.read(values_VK[1], BEGINNING)
    later = engine.after(known)

    whole = engine.token_losses(values_VK[1], _after_beginning(batch))
    np.testing.assert_allclose(later.token_losses(values_VK[1], batch), whole, rtol=0, atol=1e-4)
    # The beginning changes the losses, and its engine leaves the first one as it was.
    alone = engine.token_losses(values_VK[1], batch)
    assert np.abs(alone - whole).max() > 1e-3
    np.testing.assert_array_equal(LightEngine(tiny.package).token_losses(values_VK[1], batch), alone)

    text = np.concatenate([BEGINNING, PROMPT])
    np.testing.assert_allclose(
        _logits(later, values_VK[1], PROMPT), _logits(engine, values_VK[1], text), rtol=0, atol=1e-4
    )
    written = list(engine.generate(values_VK[1], text, _greedy(12)))
    assert list(later.generate(values_VK[1], PROMPT, _greedy(12))) == written


def test_the_end_of_the_beginning_takes_the_place_of_bos(tmp_path: Path) -> None:
    """Rows and prompts keep their form, and BOS stands at position 0 alone."""
    tiny, batch = tiny_package(tmp_path, "gemma"), tiny_batch()
    values_K, engine = variants(tiny.package, 2)[1], LightEngine(tiny.package)
    bos = (2, 11)
    batch.input_ids_BT[:2, :2] = bos
    batch.target_BT[:, 1] = False
    whole = replace(batch, input_ids_BT=batch.input_ids_BT.copy())
    whole.input_ids_BT[:2, :2] = BEGINNING[-2:]
    known = engine.read(values_K, BEGINNING)
    expected = engine.after(known.first(7)).token_losses(values_K, whole)
    got = engine.after(known, bos).token_losses(values_K, batch)
    np.testing.assert_array_equal(got, expected)
    text = np.concatenate([BEGINNING, PROMPT])
    prompt = np.concatenate([bos, PROMPT])
    later, kept = engine.after(known, bos), list[KeyValues]()
    assert list(later.generate(values_K, prompt, _greedy(9), kept.append)) == list(
        engine.generate(values_K, text, _greedy(9))
    )
    np.testing.assert_array_equal(kept[0].id_S[: len(text)], text)
    np.testing.assert_array_equal(later.read(values_K, prompt).id_S, text)


def test_it_works_in_parts_with_several_variants_and_8_bit_inputs(tmp_path: Path) -> None:
    tiny, batch = tiny_package(tmp_path, "gemma2", Scheme.INT4), tiny_batch()
    values_VK = variants(tiny.package, 3)
    engine = LightEngine(tiny.package, max_tokens=14)
    known = engine.read(values_VK[1], BEGINNING)
    together = engine.after(known).losses(values_VK, batch)
    alone = [
        LightEngine(tiny.package).after(known).losses(values_K[None], batch)[0] for values_K in values_VK
    ]
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)
    rounded = LightEngine(tiny.package, int8=True).after(known).losses(values_VK, batch)
    assert (rounded != together).any()
    np.testing.assert_allclose(rounded, together, rtol=0, atol=0.05)


def test_states_below_the_mask_are_kept_for_each_beginning(tmp_path: Path) -> None:
    tiny, batch = tiny_package(tmp_path, "llama", scope="layers:1"), tiny_batch()
    values_K, engine = tiny.package.values(), LightEngine(tiny.package)
    alone = engine.token_losses(values_K, batch)
    later = engine.after(engine.read(values_K, BEGINNING))
    fresh = LightEngine(tiny.package)
    expected = fresh.after(fresh.read(values_K, BEGINNING)).token_losses(values_K, batch)
    np.testing.assert_array_equal(later.token_losses(values_K, batch), expected)
    np.testing.assert_array_equal(engine.token_losses(values_K, batch), alone)


def test_a_text_can_be_read_in_pieces_and_cut(tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path, "gemma3_text")
    engine, values_K = LightEngine(tiny.package), variants(tiny.package, 2)[1]
    whole = engine.read(values_K, BEGINNING)
    pieces = engine.after(whole.first(4)).read(values_K, BEGINNING[4:])
    assert whole.first(4).nbytes == whole.nbytes * 4 // 9
    np.testing.assert_array_equal(pieces.id_S, BEGINNING)
    for (key, value), (same_key, same_value) in zip(whole.layers, pieces.layers, strict=True):
        np.testing.assert_allclose(same_key, key, rtol=0, atol=1e-5)
        np.testing.assert_allclose(same_value, value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stop_after", [3, 8])
def test_generation_hands_out_what_it_has_read(stop_after: int, tmp_path: Path) -> None:
    """A second turn begins with the first one, and gets the same tokens without reading it again."""
    tiny = tiny_package(tmp_path, "mistral")
    engine, values_K, kept = LightEngine(tiny.package), variants(tiny.package, 2)[1], list[KeyValues]()
    ids = engine.generate(values_K, PROMPT, _greedy(8), kept.append)
    written = [next(ids) for _ in range(stop_after)]
    del ids
    (known,) = kept
    # No pass has read the newest token yet.
    np.testing.assert_array_equal(known.id_S, [*PROMPT, *written[:-1]])
    turn = np.array([*PROMPT, *written, 9, 2, 6])
    assert known.common(turn) == len(known)
    later = engine.after(known).generate(values_K, turn[len(known) :], _greedy(8))
    assert list(later) == list(engine.generate(values_K, turn, _greedy(8)))


def test_a_beginning_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tiny, batch = tiny_package(tmp_path / "a", "llama"), tiny_batch()
    other = tiny_package(tmp_path / "b", "qwen3")
    values_K, engine = tiny.package.values(), LightEngine(tiny.package)
    known = engine.read(values_K, BEGINNING)
    with pytest.raises(InputError, match=r"keys and values float32 \[9, 2, 8\], not float32 \[9, 2, 16\]"):
        engine.after(LightEngine(other.package).read(other.package.values(), BEGINNING))
    with pytest.raises(InputError, match=r"not float64"):
        engine.after(replace(known, layers=tuple((k.astype(np.float64), v) for k, v in known.layers)))
    with pytest.raises(InputError, match="2 layers, not 1 pairs"):
        engine.after(replace(known, layers=known.layers[:1]))
    with pytest.raises(InputError, match="token ids from 0 to 95"):
        engine.after(replace(known, id_S=known.id_S + 96))
    long = engine.read(values_K, np.arange(POSITIONS - 1))
    with pytest.raises(InputError, match="63 tokens, and the model takes 64"):
        engine.after(long)
    later = engine.after(long.first(POSITIONS - 2))
    with pytest.raises(InputError, match="takes 2"):
        later.generate(values_K, PROMPT, _greedy(1))
    with pytest.raises(InputError, match="takes at most 2"):
        later.token_losses(values_K, rows_of(batch, [0]))
    with pytest.raises(InputError, match="computes no gradients"):
        later.gradient(values_K, batch)


def test_engines_that_read_every_text_are_named(tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path, "llama")
    assert remembering(LightEngine(tiny.package)) is not None
    with pytest.raises(InputError, match="The engine torch cannot begin a text with stored"):
        remembering(cast("Engine", TorchEngine(tiny.package)))
