"""Tests of the torch engine beyond the conformance suite: codes stay codes, derivatives, and devices."""

import gc
import threading
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from permille.engines.light.engine import LightEngine
from permille.engines.sampling import TokenSampling
from permille.engines.torch_engine import TorchEngine
from permille.errors import InputError, OperatorError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.quantization.types import Scheme
from tests.unit.engines.conformance import Conformance
from tests.unit.engines.tiny import (
    CONFIGS,
    POSITIONS,
    Tiny,
    reference_gradient,
    reference_model,
    tiny_batch,
    tiny_model,
    tiny_package,
    variants,
    write_package,
)

WIDE = {"hidden_size": 128, "intermediate_size": 192}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_package(tmp_path_factory.mktemp("blobs"), "llama", Scheme.INT4)


@pytest.mark.parametrize("scheme", [scheme for scheme in Scheme if scheme is not Scheme.SOURCE])
def test_a_model_holds_codes_and_no_floating_point_copy(scheme: Scheme, tmp_path: Path) -> None:
    package = tiny_package(tmp_path, "llama", scheme, density=0.005, sizes=WIDE).package
    before = {id(found) for found in _tensors()}
    engine = TorchEngine(package)
    batch, values_VK = tiny_batch(), variants(package, 2)
    engine.losses(values_VK, batch)
    engine.gradient(values_VK[0], batch)
    smallest = min(prod(info.shape) for info in package.manifest.tensors)
    new = [found for found in _tensors() if id(found) not in before]
    assert len(new) > len(package.manifest.tensors)  # the search does find the engine's tensors
    assert not [found.shape for found in new if found.is_floating_point() and found.numel() >= smallest]

    held, k = engine.resident_bytes, package.k
    table = package.config["vocab_size"] * package.config["hidden_size"]
    dense = [package.quantized(info.name) for info in package.manifest.tensors]
    assert held["packed"] == sum(tensor.packed.nbytes for tensor in dense)
    assert held["codes"] == table  # the head is tied to the embedding, so the table is stored once
    assert held["scales"] == sum(tensor.scales.nbytes for tensor in dense) + 2 * table // 32
    assert held["decoded_C"] == held["column_C"] == held["row_C"] == held["order_C"] == 4 * k
    small = sum(held[name] for name in ("weight", "bias", "row_start_N1", "column_start_K1"))
    known = sum(held[name] for name in ("packed", "codes", "scales", "decoded_C")) + 12 * k + small
    assert 0 <= sum(held.values()) - known < 1000  # the rest is the frequencies of the rotation


def _tensors() -> list[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, torch.Tensor) and not found.is_meta]


def test_a_gradient_keeps_inputs_of_layers_alone(tmp_path: Path) -> None:
    """A decoder layer runs twice for a gradient, and once for a loss."""
    engine = TorchEngine(tiny_package(tmp_path, "llama").package)
    calls: list[bool] = []
    layer = engine._model.module.model.layers[0].layer
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    batch, values_K = tiny_batch(), variants(tiny_package(tmp_path, "llama").package, 1)[0]
    engine.losses(values_K[None], batch)
    assert calls == [False]
    engine.gradient(values_K, batch)
    assert len(calls) == 3


def test_all_variants_and_rows_are_one_pass(llama: Tiny) -> None:
    engine = TorchEngine(llama.package)
    calls: list[int] = []
    engine._model.linears[0].register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    engine.losses(variants(llama.package, 4), tiny_batch())
    assert calls == [4 * 3]
    assert engine.layer_passes == 4 * 3 * 2


@pytest.mark.parametrize("family", CONFIGS)
def test_derivatives_agree_with_reverse_mode_in_float64(family: str, tmp_path: Path) -> None:
    """The reference is transformers in float64, differentiated by torch."""
    tiny = tiny_package(tmp_path, family)
    engine = TorchEngine(tiny.package)
    batch, values_K = tiny_batch(lengths=(12, 12)), tiny.package.values()
    model = reference_model(tiny.package, tiny_model(family), torch.float64)
    expected_K = reference_gradient(tiny.package, model, batch)
    _, got_K = engine.gradient(values_K, batch)
    np.testing.assert_allclose(got_K, expected_K, rtol=0, atol=1e-5 * np.abs(expected_K).max())


def test_bfloat16_differences_follow_float32_ones(llama: Tiny) -> None:
    """Estimators use the difference of two perturbed losses, so that difference must be precise."""
    batch, base_K = tiny_batch(lengths=(30,) * 8), llama.package.values()
    z_QK = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), (8, len(base_K)))
    shift_QK = 0.5 / np.sqrt(len(base_K)) * z_QK
    plus_QK, minus_QK = (base_K + shift_QK).astype(np.float32), (base_K - shift_QK).astype(np.float32)
    exact, coarse = (
        np.subtract(engine.losses(plus_QK, batch), engine.losses(minus_QK, batch))
        for engine in (TorchEngine(llama.package, compute_dtype=name) for name in ("float32", "bfloat16"))
    )
    assert np.linalg.norm(coarse - exact) < 0.3 * np.linalg.norm(exact)


def test_a_long_text_ends_at_the_models_last_position(llama: Tiny) -> None:
    engine = TorchEngine(llama.package)
    tokens = list(
        engine.generate(llama.package.values(), np.array([1, 2, 3]), TokenSampling(max_new_tokens=1000))
    )
    assert len(tokens) == POSITIONS - 3


@pytest.mark.parametrize("make", [TorchEngine, LightEngine])
def test_text_streams_while_losses_are_computed(
    llama: Tiny, make: Callable[[Package], TorchEngine | LightEngine]
) -> None:
    """After another call, the engine restores the values of the text."""
    engine = make(llama.package)
    values_VK = variants(llama.package, 2)
    quiet = list(engine.generate(values_VK[0], np.array([1, 2, 3]), TokenSampling(max_new_tokens=8)))
    stream = engine.generate(values_VK[0], np.array([1, 2, 3]), TokenSampling(max_new_tokens=8))
    mixed = []
    for token in stream:
        mixed.append(token)
        engine.losses(values_VK[1:], tiny_batch())
    assert mixed == quiet


def test_threads_are_served_one_at_a_time(llama: Tiny) -> None:
    engine = TorchEngine(llama.package)
    values_VK, batch = variants(llama.package, 4), tiny_batch()
    alone = [engine.losses(values_K[None], batch) for values_K in values_VK]
    got: dict[int, list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]] = {}

    def work(index: int) -> None:
        got[index] = [engine.losses(values_VK[index : index + 1], batch) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, expected in enumerate(alone):
        assert all(np.array_equal(losses, expected) for losses in got[index])


def test_info_says_what_decides_the_bits(llama: Tiny) -> None:
    before = torch.get_num_threads()
    try:
        info = TorchEngine(llama.package, compute_dtype="bfloat16", threads=before + 1).info()
        assert info["threads"] == before + 1
    finally:
        torch.set_num_threads(before)
    assert TorchEngine(llama.package).info()["threads"] == before
    assert f"torch {torch.__version__}" in info["version"]
    assert (info["name"], info["compute_dtype"], info["device"]) == ("torch", "bfloat16", "cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"device": "tpu"},
        {"device": "cuda:first"},
        {"compute_dtype": "float16"},
        {"threads": 0},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_options_that_are_wrong_are_refused(llama: Tiny, options: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"must be|is not a compute dtype"):
        TorchEngine(llama.package, **options)  # type: ignore[arg-type]


def test_a_device_that_is_not_there_needs_an_operator(llama: Tiny) -> None:
    with pytest.raises(OperatorError, match="There is no CUDA device"):
        TorchEngine(llama.package, device=f"cuda:{torch.cuda.device_count()}")


def test_a_model_that_sees_the_future_is_refused(tmp_path: Path) -> None:
    model = tiny_model("gemma3_text")
    model.config.use_bidirectional_attention = True
    package = write_package(BlobFolder(tmp_path), model, Scheme.NF4)
    with pytest.raises(InputError, match="reads in both directions"):
        TorchEngine(package)


def test_text_of_a_model_that_sees_one_token_is_that_of_the_reference(tmp_path: Path) -> None:
    model = tiny_model("mistral", sliding_window=1)
    package = write_package(BlobFolder(tmp_path), model, Scheme.NF4)
    tiny = Tiny(package=package, reference=reference_model(package, model))
    Conformance(engine=TorchEngine(tiny.package), tiny=tiny).greedy_text_is_that_of_the_reference()
