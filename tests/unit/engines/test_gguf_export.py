"""Tests of exports to GGUF files, read back by the `gguf` package. `test_llama_cpp` runs llama.cpp itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from permille.engines.gguf.export import GGUF_FILE, MODELFILE, export_gguf
from permille.errors import InputError
from permille.models.gguf.description import describe
from permille.models.gguf.vocabulary import vocabulary_of
from permille.package.reader import Package
from permille.quantization import dequantize as decoded
from permille.quantization.types import Scheme
from tests.packages import tiny_tokenizer
from tests.unit.engines.gguf_packages import FAMILIES, TEMPLATE, VOCABULARY, exported_package
from tests.unit.engines.gguf_packages import sentencepiece_tokenizer as sentencepiece
from tests.unit.engines.tiny import variants


def tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    found = GGUFReader(folder / GGUF_FILE).tensors
    return {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in found}


def field(folder: Path, name: str) -> Any:
    found = GGUFReader(folder / GGUF_FILE).get_field(name)
    return None if found is None else found.contents()


def merged(package: Package, values_K: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """Return a linear layer's weights with `values_K` set."""
    start = 0
    for info in package.manifest.tensors:
        if info.name == name:
            weight_NK = decoded(package.quantized(name))
            weight_NK.reshape(-1)[package.mask(name)] = values_K[start : start + info.count]
            return weight_NK
        start += info.count
    raise KeyError(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_holds_every_tensor_of_every_family_exactly(family: str, tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", family)
    values_K = variants(package, 2, scale=0.2)[1]
    exported = export_gguf(package, values_K, tmp_path / "out", kind="f32")
    found = tensors(tmp_path / "out")
    assert exported.kept == 1.0
    assert exported.size_bytes == (tmp_path / "out" / GGUF_FILE).stat().st_size
    assert len(found) == len(package.manifest.tensors) + len(package.plain_names)
    own = sorted(merged(package, values_K, info.name).sum() for info in package.manifest.tensors)
    theirs = sorted(
        weight.sum() for name, weight in found.items() if weight.ndim == 2 and name.startswith("blk.")
    )
    np.testing.assert_allclose(theirs, own, atol=1e-3)
    down = [info.name for info in package.manifest.tensors if "down" in info.name or "4h_to_h" in info.name]
    np.testing.assert_array_equal(found["blk.1.ffn_down.weight"], merged(package, values_K, down[1]))
    norm = next(name for name in package.plain_names if name.endswith("norm.weight"))
    plus = 1.0 if family.startswith("gemma") else 0.0
    assert any(np.array_equal(tensor, package.plain(norm).float32() + plus) for tensor in found.values())
    assert field(tmp_path / "out", f"{describe(package.config).name}.vocab_size") == VOCABULARY


@pytest.mark.parametrize("family", ["llama", "smollm3", "granite"])
def test_heads_are_turned_for_llama_cpps_rotation(family: str, tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", family, changes={"attention_bias": family != "smollm3"})
    export_gguf(package, None, tmp_path / "out", kind="f32")
    name = "model.layers.0.self_attn.k_proj"
    own_HPEK = merged(package, package.values(), f"{name}.weight").reshape(2, 2, 8, 64)
    found = tensors(tmp_path / "out")
    np.testing.assert_array_equal(
        found["blk.0.attn_k.weight"].reshape(2, 8, 2, 64), own_HPEK.transpose(0, 2, 1, 3)
    )
    if family != "smollm3":
        bias_HPE = package.plain(f"{name}.bias").float32().reshape(2, 2, 8)
        turned_HEP = found["blk.0.attn_k.bias"].reshape(2, 8, 2)
        np.testing.assert_array_equal(turned_HEP, bias_HPE.transpose(0, 2, 1))


def test_an_olmos_heads_stay_as_they_are(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "olmo2")
    export_gguf(package, None, tmp_path / "out", kind="f32")
    own = merged(package, package.values(), "model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(tensors(tmp_path / "out")["blk.0.attn_q.weight"], own)


def test_a_granites_multipliers_are_in_its_file(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "granite")
    export_gguf(package, None, tmp_path / "out", kind="f32")
    keys = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    found = [field(tmp_path / "out", f"granite.{key}") for key in keys]
    np.testing.assert_allclose(found, [0.2, 3.0, 0.6, 2.0], rtol=1e-6)


def test_a_tied_head_is_stored_twice_where_llama_cpp_asks_for_it(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "olmo2", changes={"tie_word_embeddings": True})
    export_gguf(package, None, tmp_path / "out", kind="f32")
    found = tensors(tmp_path / "out")
    np.testing.assert_array_equal(found["output.weight"], found["token_embd.weight"])


# Names that llama.cpp's graphs expect (src/models/olmo2.cpp, granite.cpp and smollm3.cpp).
_PRE = {f"{name}.weight" for name in ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output")}
_MLP = {"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"}
_BLOCKS = {
    "smollm3": _PRE | _MLP,
    "granite": _PRE | _MLP,
    "olmo2": (_PRE - {"attn_norm.weight", "ffn_norm.weight"})
    | _MLP
    | {f"{name}.weight" for name in ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")},
}


@pytest.mark.parametrize("family", _BLOCKS)
def test_tensors_have_the_names_that_llama_cpp_asks_for(family: str, tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", family)
    export_gguf(package, None, tmp_path / "out", kind="f32")
    found = tensors(tmp_path / "out").keys()
    assert {name.removeprefix("blk.1.") for name in found if name.startswith("blk.1.")} == _BLOCKS[family]
    outside = {name for name in found if not name.startswith("blk.")}
    tied = {"token_embd.weight", "output_norm.weight"}
    assert outside == (tied if package.config["tie_word_embeddings"] else tied | {"output.weight"})


@pytest.mark.parametrize(
    ("scheme", "kind", "least"),
    [
        (Scheme.INT4, "f16", 0.999999),
        (Scheme.INT4, "q8_0", 0.9999),
        (Scheme.INT4, "q4_0", 0.99),
        (Scheme.INT8, "q8_0", 0.9999),
    ],
)
def test_the_personal_change_survives(scheme: Scheme, kind: str, least: float, tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama", scheme, changes={"intermediate_size": 96})
    values_K = variants(package, 2, scale=0.2)[1]
    exported = export_gguf(package, values_K, tmp_path / "out", kind=kind)
    assert least < exported.kept < 1
    assert exported.as_float16 == 0
    name = "model.layers.1.mlp.up_proj.weight"
    mask_k = package.mask(name)
    wanted_k = merged(package, values_K, name).reshape(-1)[mask_k]
    base_k = merged(package, package.values(), name).reshape(-1)[mask_k]
    error_k = tensors(tmp_path / "out")["blk.1.ffn_up.weight"].reshape(-1)[mask_k] - wanted_k
    assert 1 - (error_k**2).sum() / ((wanted_k - base_k) ** 2).sum() > least


def test_rows_that_blocks_do_not_fill_are_float16(tmp_path: Path) -> None:
    # The last matrix of each decoder layer has 44 columns, which is not a multiple of the block size.
    package = exported_package(tmp_path / "blobs", "llama")
    assert export_gguf(package, None, tmp_path / "out", kind="q4_0").as_float16 == 2
    types = {
        tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "out" / GGUF_FILE).tensors
    }
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == "Q4_0"
    assert types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == "F32"


def test_the_folder_is_its_users_alone_and_has_a_modelfile(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "qwen2")
    export_gguf(package, None, tmp_path / "out", kind="q8_0")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MODELFILE, GGUF_FILE]
    lines = (tmp_path / "out" / MODELFILE).read_text().splitlines()
    assert lines[0] == "FROM ./model.gguf"
    assert lines[1].startswith('TEMPLATE """{{ range')
    assert lines[2:] == ['PARAMETER stop "</s>"', "PARAMETER num_ctx 64"]
    assert field(tmp_path / "out", "general.name") == "out"
    with pytest.raises(InputError, match="holds files"):
        export_gguf(package, None, tmp_path / "out", kind="q8_0")


def test_what_llama_cpp_computes_otherwise_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("opt", {"word_embed_proj_dim": 64}, "a family of"),
        *((family, {}, "a family of") for family in ("olmo3", "exaone4", "phi3", "ministral3")),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}, "a rotation in all layers but every 4th"),
        ("olmo2", {"attention_bias": True}, "no biases"),
        ("olmo2", {"head_dim": 8}, "heads that are as wide together"),
        ("gemma2", {"query_pre_attn_scalar": 64}, "scores scaled"),
        ("gemma2", {"attn_logit_softcapping": None}, "soft caps"),
        ("gemma2", {"final_logit_softcapping": None}, "soft caps"),
        ("qwen3", {"attention_bias": True}, "no biases"),
        ("llama", {"hidden_act": "gelu"}, "activation"),
        ("gpt_neox", {"attention_bias": False}, "biases of attention"),
        ("qwen2", {"rope_parameters": _LLAMA3}, "rope"),
    ]
    for number, (family, changes, message) in enumerate(cases):
        package = exported_package(tmp_path / f"blobs{number}", family, changes=changes)
        with pytest.raises(InputError, match=message):
            export_gguf(package, None, tmp_path / "out", kind="f32")
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("blobs")]


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_a_window_that_all_layers_share_bounds_the_context(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "mistral", changes={"sliding_window": 5})
    assert describe(package.config).positions == 5


def test_frequencies_are_told(tmp_path: Path) -> None:
    linear = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}
    found = describe(exported_package(tmp_path / "a", "qwen2", changes=linear).config)
    assert (found.rope_theta, found.rope_linear, found.rope_factor_E) == (5e5, 4.0, None)
    found = describe(exported_package(tmp_path / "b", "llama", changes={"rope_parameters": _LLAMA3}).config)
    assert found.rope_factor_E is not None
    assert found.rope_factor_E[0] == 1.0
    np.testing.assert_allclose(found.rope_factor_E[-1], 8.0, rtol=1e-6)


def test_four_bits_need_int4_and_enough_of_the_change(tmp_path: Path) -> None:
    for scheme in (Scheme.NF4, Scheme.INT8):
        other = exported_package(tmp_path / scheme, "llama", scheme)
        with pytest.raises(InputError, match=f"levels of {scheme}. Choose the type q8_0"):
            export_gguf(other, None, tmp_path / "out", kind="q4_0")
    package = exported_package(tmp_path / "int4", "llama", changes={"intermediate_size": 96})
    with pytest.raises(InputError, match=r"Only [0-9.]+% of the personal change .* Choose the type q8_0"):
        export_gguf(package, variants(package, 2, scale=1e-4)[1], tmp_path / "out", kind="q4_0")
    with pytest.raises(InputError, match=r"of the personal change fits into f16, .* Choose the type f32"):
        export_gguf(package, variants(package, 2, scale=1e-7)[1], tmp_path / "out", kind="f16")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_bytes(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama")
    export_gguf(package, None, tmp_path / "out", kind="f16")
    own = json.loads(package.file("tokenizer.json"))["model"]
    tokens = field(tmp_path / "out", "tokenizer.ggml.tokens")
    assert field(tmp_path / "out", "tokenizer.ggml.model") == "gpt2"
    assert field(tmp_path / "out", "tokenizer.ggml.pre") == "gpt-2"
    assert len(tokens) == VOCABULARY
    assert all(tokens[number] == token for token, number in own["vocab"].items())
    assert tokens[-1] == f"[PAD{VOCABULARY - 1}]"
    assert field(tmp_path / "out", "tokenizer.ggml.merges") == [" ".join(pair) for pair in own["merges"]]
    assert field(tmp_path / "out", "tokenizer.ggml.bos_token_id") == 0
    assert field(tmp_path / "out", "tokenizer.ggml.eos_token_id") == 1
    assert field(tmp_path / "out", "tokenizer.ggml.add_bos_token") is False
    assert field(tmp_path / "out", "tokenizer.ggml.token_type")[:3] == [3, 3, 3]
    assert field(tmp_path / "out", "tokenizer.chat_template") == TEMPLATE


def test_a_tokenizer_of_sentencepiece(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama", tokenizer=sentencepiece())
    found = vocabulary_of(package.find_file, VOCABULARY)
    assert found.cut is None
    assert found.add_bos
    assert found.space_first
    assert found.special == {"bos": 1, "eos": 2}
    assert found.types[3:259] == [6] * 256
    scores = [score for score in found.scores if score]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) > 100


def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    whole = json.loads(sentencepiece())
    fewer = json.loads(json.dumps(whole))
    longest = max(fewer["model"]["merges"], key=lambda pair: len("".join(pair)))
    fewer["model"]["merges"].remove(longest)
    split = json.loads(tiny_tokenizer(VOCABULARY - 8).to_str())
    split["pre_tokenizer"]["add_prefix_space"] = True
    lower = json.loads(json.dumps(whole))
    lower["normalizer"] = {"type": "Lowercase"}
    words = {**whole, "model": {**whole["model"], "type": "WordPiece"}}
    large = tiny_tokenizer(VOCABULARY + 40)
    long = json.loads(json.dumps(whole))
    long["model"]["vocab"]["a" * 100_000] = VOCABULARY - 1
    for number, (document, message) in enumerate(
        [
            (fewer, "sentencepiece's scores"),
            (split, "cut a text"),
            (lower, "Lowercase"),
            (words, "byte pair encoding"),
            (long, "at most 256"),
            (json.loads(large.to_str()), "rows of the embedding"),
        ]
    ):
        package = exported_package(tmp_path / str(number), "llama", tokenizer=json.dumps(document).encode())
        with pytest.raises(InputError, match=message):
            vocabulary_of(package.find_file, VOCABULARY)
    package = exported_package(tmp_path / "broken", "llama", tokenizer=b'{"model": {"vocab": 3}}')
    with pytest.raises(InputError, match="unknown form"):
        vocabulary_of(package.find_file, VOCABULARY)


def test_a_table_in_8_bits_goes_out_as_it_is(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama", Scheme.INT4)
    assert package.plain_dtype("model.embed_tokens.weight") == "Q8_0"
    for kind in ("q4_0", "q8_0"):
        export_gguf(package, None, tmp_path / kind, kind=kind)
        reader = GGUFReader(tmp_path / kind / GGUF_FILE)
        stored = {tensor.name: tensor for tensor in reader.tensors}
        own = package.plain("model.embed_tokens.weight").data
        assert stored["token_embd.weight"].data.tobytes() == own.tobytes()
