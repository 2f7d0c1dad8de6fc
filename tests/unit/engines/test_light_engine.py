"""Tests of the light engine beyond the suite: refused configurations, shared memory and stored states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.engines.interface import GradientEngine
from permille.engines.light import blas
from permille.engines.light.engine import LightEngine
from permille.engines.light.linear import Tools
from permille.engines.light.sequences import JoinedSequences, join_sequences
from permille.engines.sampling import TokenSampling
from permille.engines.torch_engine import TorchEngine
from permille.errors import InputError
from permille.models.architecture import architecture_of
from permille.models.rope import rope_of
from permille.native.library import VARIABLE
from permille.package.blobs import BlobFolder
from permille.package.config_files import clean_config
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille.zo.estimators import Batch, Descent
from permille.zo.steps import take_step
from permille_lab.measuring.random_packages import Shape, random_package
from tests.unit.engines.conformance import Conformance
from tests.unit.engines.tiny import (
    Tiny,
    peak_bytes,
    reference_model,
    rows_of,
    split_variants,
    tiny_batch,
    tiny_model,
    tiny_package,
    variants,
    write_package,
)
from tests.unit.zo.logs import make_header

Array = NDArray[np.float32]


def _tiny(folder: Path, family: str, **changes: Any) -> Tiny:
    model = tiny_model(family, **changes)
    package = write_package(BlobFolder(folder), model, Scheme.INT4)
    return Tiny(package=package, reference=reference_model(package, model))


def _config(family: str) -> dict[str, Any]:
    return clean_config(tiny_model(family).config.to_dict())


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
YARN_UNTRUNCATED = {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 20, "beta_slow": 2}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0} | LLAMA3,
    "yarn": YARN,
    "yarn untruncated": YARN | YARN_UNTRUNCATED,
    "yarn with its own factor": YARN | {"attention_factor": 1.2},
}


@pytest.mark.parametrize("make", [LightEngine, TorchEngine])
@pytest.mark.parametrize("name", ROPES)
def test_rope_types_are_those_of_the_reference(
    name: str, make: Callable[[Package], GradientEngine], tmp_path: Path
) -> None:
    parameters = {"rope_type": name.split()[0], "rope_theta": 1000.0} | ROPES[name]
    tiny = _tiny(tmp_path, "llama", rope_parameters=parameters)
    Conformance(engine=make(tiny.package), tiny=tiny).token_losses_are_those_of_the_reference()


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 4.0],
}


@pytest.mark.parametrize("make", [LightEngine, TorchEngine])
@pytest.mark.parametrize("changes", [{}, {"factor": 4.0}, {"attention_factor": 1.2}])
def test_a_long_rope_is_that_of_the_reference_up_to_the_original_context(
    changes: dict[str, float], make: Callable[[Package], GradientEngine], tmp_path: Path
) -> None:
    rope = LONG_ROPE | changes
    tiny = _tiny(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=40)
    engine = make(tiny.package)
    Conformance(engine=engine, tiny=tiny).token_losses_are_those_of_the_reference()
    with pytest.raises(InputError, match="40"):
        list(engine.generate(tiny.package.values(), np.ones(41, np.int64), TokenSampling(max_new_tokens=1)))
    # Otherwise, a row's loss would depend on its neighbours' lengths.
    with pytest.raises(InputError, match="40"):
        engine.losses(tiny.package.values()[None], tiny_batch(lengths=(12, 41)))


@pytest.mark.parametrize("factors", [None, [1.0, 2.0], [1.0, 2.0, 0.0], "1"])
def test_a_long_rope_without_its_factors_is_refused(factors: object) -> None:
    with pytest.raises(InputError, match="short_factor"):
        rope_of(LONG_ROPE | {"short_factor": factors}, head=8, positions=64)


@pytest.mark.parametrize(
    ("sizes", "scheme", "words"),
    [
        ({"intermediate_size": 43}, Scheme.NF4, "cannot be divided: rows 43 to 86 .*--engine torch"),
        ({"intermediate_size": 43, "hidden_size": 36}, Scheme.INT4, None),
    ],
)
def test_stacked_matrices_are_divided_where_their_blocks_are(
    sizes: dict[str, int], scheme: Scheme, words: str | None, tmp_path: Path
) -> None:
    tiny = tiny_package(tmp_path, "phi3", scheme, sizes=sizes)
    if words is None:
        Conformance(engine=LightEngine(tiny.package), tiny=tiny).token_losses_are_those_of_the_reference()
        return
    with pytest.raises(InputError, match=words):
        LightEngine(tiny.package)


WINDOWS = {"use_sliding_window": True, "sliding_window": 4}
BOTH_KINDS = ["full_attention", "sliding_attention"]
VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {"mlp_bias": True, "tie_word_embeddings": False}),
    "one key-value head": ("llama", {"num_key_value_heads": 1}),
    "no window": ("mistral", {"sliding_window": None}),
    "own head size": ("mistral", {"head_dim": 16}),
    "windows from a layer": ("qwen2", WINDOWS | {"max_window_layers": 1}),
    "windows from the first layer": ("qwen2", WINDOWS | {"max_window_layers": 0}),
    "biases of attention": ("qwen3", {"attention_bias": True}),
    "exact gelu": ("llama", {"hidden_act": "gelu"}),
    "layers by name": ("gemma2", {"layer_types": BOTH_KINDS, "attn_logit_softcapping": 0.5}),
    "a pattern": ("gemma3_text", {"num_hidden_layers": 3, "layer_types": None, "query_pre_attn_scalar": 9}),
    "norms behind": ("opt", {"do_layer_norm_before": False}),
    "norms without weights": ("opt", {"layer_norm_elementwise_affine": False, "enable_bias": False}),
    "one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "all rotated": ("gpt_neox", {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}}),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_variations_of_a_family_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    family, changes = VARIATIONS[name]
    tiny = _tiny(tmp_path, family, **changes)
    suite = Conformance(engine=LightEngine(tiny.package), tiny=tiny)
    suite.token_losses_are_those_of_the_reference()
    suite.derivatives_are_those_of_reverse_mode()
    suite.greedy_text_is_that_of_the_reference()


REFUSED: dict[str, dict[str, Any]] = {
    "an unknown activation": {"hidden_act": "gelu_fast"},
    "an activation that is no text": {"hidden_act": 3},
    "bidirectional attention": {"use_bidirectional_attention": True},
    "another rope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
    "a key of another rope": {"rope_parameters": {"rope_type": "default", "mrope_section": [1]}},
    "a rope that is no table": {"rope_parameters": [1]},
    "an odd rotation": {"head_dim": 7},
    "a rotation of a part": {"partial_rotary_factor": 0.5},
    "a rope without its factor": {"rope_parameters": {"rope_type": "linear"}},
    "a negative base": {"rope_theta": -1.0},
    "a window in a family without": {"sliding_window": 8},
    "a soft cap in a family without": {"attn_logit_softcapping": 30.0},
    "a scale in a family without": {"query_pre_attn_scalar": 64},
    "a norm before that it has not": {"do_layer_norm_before": False},
    "layer types in a family without": {"layer_types": ["full_attention"] * 2},
    "no epsilon": {"rms_norm_eps": 0},
    "an epsilon beyond all floats": {"rms_norm_eps": 10**400},
    "a stretched rope without a base": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0} | YARN},
    "an epsilon that is no number": {"rms_norm_eps": "1e-5"},
    "a context that is no whole number": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 0.5},
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_mathematics_that_it_does_not_have_is_refused_by_name(name: str) -> None:
    config = _config("llama") | {"rope_parameters": None, "rope_theta": 1e4}
    architecture_of(config)
    with pytest.raises(InputError, match=r"The light engine needs .*torch engine"):
        architecture_of(config | REFUSED[name])


def test_a_ministral_without_its_rotation_is_refused() -> None:
    config = _config("ministral3")
    assert architecture_of(config).positions == 32
    with pytest.raises(InputError, match="llama_4_scaling_beta"):
        architecture_of(config | {"rope_parameters": None})


def test_positions_beyond_all_floats_are_refused_in_few_words() -> None:
    with pytest.raises(InputError, match=r"max_position_embeddings in config.json must be") as refused:
        architecture_of(_config("llama") | {"max_position_embeddings": 10**400})
    assert len(str(refused.value)) < 400


def test_a_rotation_of_more_than_a_head_and_windows_without_a_size_are_refused() -> None:
    with pytest.raises(InputError, match="sliding_window"):
        architecture_of(_config("gemma2") | {"sliding_window": None})
    for part in (1.5, 1e308):
        with pytest.raises(InputError, match="from 2 to 16 of rotated numbers"):
            rope_of({"rope_theta": 1e4, "partial_rotary_factor": part}, head=16, positions=64)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_numpy_alone_conforms(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    tiny = tiny_package(tmp_path, family)
    engine = LightEngine(tiny.package)
    assert engine.info()["version"].endswith("kernels numpy")
    Conformance(engine=engine, tiny=tiny).check()


def test_another_blas_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without numpy's own BLAS library, the engine uses numpy's matmul."""
    monkeypatch.setattr(blas, "_library", lambda: None)
    tiny = tiny_package(tmp_path, "llama")
    engine = LightEngine(tiny.package)
    assert "numpy's matmul" in engine.info()["version"]
    Conformance(engine=engine, tiny=tiny).check()


def test_numpys_own_library_is_found_here() -> None:
    assert "OpenBLAS" in blas.Blas().name


def test_a_sequence_ends_before_its_last_target_and_one_without_is_left_out() -> None:
    target_BT = np.zeros((4, 6), bool)
    target_BT[0, [1, 3]] = True
    target_BT[2, 5] = True
    target_BT[3, 2] = True
    ids_BT = np.arange(24).reshape(4, 6)
    batch = Batch(input_ids_BT=ids_BT, attention_BT=np.ones((4, 6), bool), target_BT=target_BT)

    (whole,) = join_sequences(batch, 100)
    assert whole.id_M.tolist() == [0, 1, 2, 12, 13, 14, 15, 16, 18, 19]
    assert whole.position_M.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert whole.target_R.tolist() == [1, 3, 17, 20]
    assert whole.state_R.tolist() == [0, 2, 7, 9]
    parts = list(join_sequences(batch, 7))
    assert [part.id_M.tolist() for part in parts] == [[0, 1, 2], [12, 13, 14, 15, 16, 18, 19]]
    assert np.concatenate([part.target_R for part in parts]).tolist() == [1, 3, 17, 20]


def _upper_half(folder: Path) -> Package:
    shape = Shape(hidden=64, inner=96, layers=4, heads=4, kv_heads=2, vocabulary=96)
    return random_package(folder, shape, density=0.01, first_layer=2)


def _below_mask_counted(engine: LightEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, collect the number of tokens of every sequence in the layers below the mask."""
    tokens: list[int] = []
    computed = engine._below_mask

    def counted(joined: JoinedSequences, tools: Tools) -> Array:
        tokens.append(len(joined.id_M))
        return computed(joined, tools)

    monkeypatch.setattr(engine, "_below_mask", counted)
    return tokens


@pytest.mark.parametrize("int8", [False, True])
def test_layers_below_the_mask_are_computed_once(
    int8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tiny_package(tmp_path, "llama", Scheme.INT4, scope="layers:1").package
    values_VK, batch = variants(package, 3, scale=0.1), tiny_batch()
    none, kept = (LightEngine(package, kept_bytes=size, int8=int8) for size in (0, 1 << 20))
    expected_V = none.losses(values_VK, batch)
    expected_loss, expected_K = none.gradient(values_VK[0], batch)

    computed = _below_mask_counted(kept, monkeypatch)
    for _ in range(2):
        np.testing.assert_array_equal(kept.losses(values_VK, batch), expected_V)
    assert len(computed) == 3
    for _ in range(2):
        loss, found_K = kept.gradient(values_VK[0], batch)
        assert (loss, found_K.tolist()) == (expected_loss, expected_K.tolist())
    # States of 8-bit losses are not used for derivatives, which are in float32.
    assert len(computed) == (6 if int8 else 3)


def test_kept_states_have_the_same_bits_whatever_batch_they_were_met_in(tmp_path: Path) -> None:
    """So a resumed run computes the same bits as one without a pause."""
    package = _upper_half(tmp_path)
    batch, values_VK = tiny_batch(lengths=(12, 7, 9, 12, 5)), variants(package, 2, scale=0.1)
    expected = LightEngine(package).losses(values_VK, batch)
    engine = LightEngine(package)
    for rows in ([4], [0, 3, 1], [2]):
        engine.losses(values_VK, rows_of(batch, rows))
    np.testing.assert_array_equal(engine.losses(values_VK, batch), expected)


def test_states_beyond_the_bound_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = _upper_half(tmp_path)
    values_VK, batch = variants(package, 2, scale=0.1), tiny_batch(lengths=(12, 7, 9))
    longest_bytes = 12 * 64 * 4
    engine = LightEngine(package, kept_bytes=longest_bytes)
    computed = _below_mask_counted(engine, monkeypatch)
    for _ in range(2):
        engine.losses(values_VK, batch)
    assert len(computed) == 5


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("max_tokens", [1024, 200, 7])
def test_what_variants_share_is_computed_once_with_the_same_bits(
    max_tokens: int, int8: bool, tmp_path: Path
) -> None:
    shape = Shape(hidden=64, inner=96, layers=4, heads=4, kv_heads=2, vocabulary=96)
    scheme = Scheme.INT4 if int8 else Scheme.NF4
    package = random_package(tmp_path, shape, density=0.01, scheme=scheme)
    batch, values_VK = tiny_batch(lengths=(12, 7, 9)), split_variants(package)
    alone, engine = (LightEngine(package, max_tokens=max_tokens, int8=int8) for _ in range(2))
    expected = np.concatenate([alone.losses(values_K[None], batch) for values_K in values_VK])
    np.testing.assert_array_equal(engine.losses(values_VK, batch), expected)
    assert alone.layer_passes == 3 * 4 * 16
    assert engine.layer_passes == 3 * (2 * 4 + 2 * 16)
    shuffled = np.random.default_rng(0).permutation(16)
    np.testing.assert_array_equal(engine.losses(values_VK[shuffled], batch), expected[shuffled])
    assert engine.layer_passes == 2 * 3 * (2 * 4 + 2 * 16)


@pytest.mark.parametrize("kind", [EstimatorKind.SPSA, EstimatorKind.ONE_SIDED])
def test_a_step_of_the_upper_layers_computes_the_lower_ones_once(kind: EstimatorKind, tmp_path: Path) -> None:
    shape = Shape(hidden=64, inner=96, layers=4, heads=4, kv_heads=2, vocabulary=96)
    package, batch = random_package(tmp_path, shape, density=0.01), tiny_batch(lengths=(12, 7))
    tensor = 3 * len(package.counts) // 4
    header = make_header(counts=package.counts, estimator=kind, queries=4, first_tensor=tensor)
    engine, s_K = LightEngine(package), np.zeros(package.k, np.int64)
    descent = Descent(header=header, w_base_K=package.values())
    take_step(engine, batch, descent, s_K, 0, normalised=True)
    assert engine.layer_passes == 2 * (3 + (8 if kind is EstimatorKind.SPSA else 4))


@pytest.mark.parametrize("max_tokens", [4096, 200, 7])
def test_the_torch_engine_does_the_same_layer_passes(max_tokens: int, tmp_path: Path) -> None:
    shape = Shape(hidden=64, inner=96, layers=4, heads=4, kv_heads=2, vocabulary=96)
    package, batch = random_package(tmp_path, shape, density=0.01), tiny_batch(lengths=(12, 7, 9))
    values_VK = split_variants(package)[np.random.default_rng(0).permutation(16)]
    light, coded = LightEngine(package), TorchEngine(package, max_tokens=max_tokens)
    found_V, expected_V = coded.losses(values_VK, batch), light.losses(values_VK, batch)
    np.testing.assert_allclose(found_V, expected_V, rtol=0, atol=1e-5)
    assert coded.layer_passes == light.layer_passes == 3 * (2 * 4 + 2 * 16)


def test_a_gradient_counts_the_passes_of_the_masked_layers(tmp_path: Path) -> None:
    package, batch = _upper_half(tmp_path), tiny_batch(lengths=(12, 7))
    engine = LightEngine(package)
    engine.gradient(package.values(), batch)
    assert engine.layer_passes == 2 * (2 + 3 * 2)
    engine.gradient(package.values(), batch)
    # The second call uses the stored states of the layers below the mask.
    assert engine.layer_passes == 2 * (2 + 2 * 3 * 2)


@pytest.mark.parametrize("call", ["open", "losses", "derivatives", "generate"])
def test_embedding_and_head_are_never_copied(call: str, tmp_path: Path) -> None:
    shape = Shape(hidden=64, inner=96, layers=1, heads=4, kv_heads=2, vocabulary=160_000)
    package = random_package(tmp_path, shape, density=0.01)
    table_bytes = package.plain("lm_head.weight").data.nbytes
    values_K, batch = package.values(), tiny_batch()

    def work() -> None:
        engine = LightEngine(package, threads=1)
        if call == "losses":
            engine.losses(values_K[None], batch)
        elif call == "derivatives":
            engine.gradient(values_K, batch)
        elif call == "generate":
            list(engine.generate(values_K, np.array([1, 2]), TokenSampling(max_new_tokens=2)))

    assert peak_bytes(work) < 0.75 * table_bytes


def test_no_weight_is_unpacked_as_a_whole(tmp_path: Path) -> None:
    """A weight of 4 M numbers is 16 MB in float32. A tile of it is 6 MB."""
    shape = Shape(hidden=2048, inner=2048, layers=1, heads=4, kv_heads=4, vocabulary=96)
    package = random_package(tmp_path, shape, density=1e-4)
    engine = LightEngine(package, threads=1)
    values_K, batch = package.values(), tiny_batch()
    assert peak_bytes(lambda: engine.losses(values_K[None], batch)) < 12e6


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    package = tiny_package(tmp_path, "llama").package
    with pytest.raises(InputError, match="threads must be at least 1, not 0"):
        LightEngine(package, threads=0)
    with pytest.raises(InputError, match="max_tokens must be at least 1, not 0"):
        LightEngine(package, max_tokens=0)
