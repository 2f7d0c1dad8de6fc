"""Tests of families.py against the state dicts that transformers builds from the same configs."""

import re
from typing import Any

import pytest
import torch
import transformers

from permille.errors import InputError
from permille.models.descriptions import Family
from permille.models.families import (
    SCOPE_PATTERN,
    canonical_name,
    expected_tensors,
    family_of,
    is_tied,
    layer_of,
    scoped_tensors,
)
from permille.models.settings import within_positions

_SIZES: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32}
_SHARED = _SIZES | {"num_hidden_layers": 3, "num_attention_heads": 4}
_SMALL = _SHARED | {"intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}
_OPT = _SHARED | {"word_embed_proj_dim": 32, "ffn_dim": 48, "max_position_embeddings": 64}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 16}),
    ("mistral", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 8, "attention_bias": True}),
    ("gemma", {"head_dim": 8}),
    ("gemma2", {"head_dim": 8, "attention_bias": True}),
    ("gemma3_text", {"head_dim": 8, "tie_word_embeddings": False}),
    ("gpt_neox", {}),
    ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    ("granite", {}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("olmo2", {"attention_bias": True}),
    ("olmo3", {}),
    ("exaone4", {}),
    ("ministral3", {"head_dim": 8}),
    ("phi3", {}),
    ("phi3", {"head_dim": 16}),
    ("opt", _OPT),
    ("opt", _OPT | {"word_embed_proj_dim": 16}),
    ("opt", _OPT | {"do_layer_norm_before": False, "tie_word_embeddings": False}),
    ("opt", _OPT | {"enable_bias": False}),
    ("opt", _OPT | {"layer_norm_elementwise_affine": False}),
    ("opt", _OPT | {"_remove_final_layer_norm": True}),
]


def config_of(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    base = {} if family == "opt" else _SMALL
    if family == "gpt_neox":
        base = {key: value for key, value in base.items() if key != "num_key_value_heads"}
    config = transformers.AutoConfig.for_model(family, **(base | changes))
    loaded: dict[str, Any] = config.to_dict()
    return loaded


def model_of(config: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    return model


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_expected_tensors_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    config = config_of(family, changes)
    state = {name: tuple(tensor.shape) for name, tensor in model_of(config).state_dict().items()}
    if is_tied(config):
        state.pop("lm_head.weight")
    assert expected_tensors(config) == state


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_scope_is_every_linear_layer_of_the_blocks_and_nothing_else(
    family: str, changes: dict[str, Any]
) -> None:
    config = config_of(family, changes)
    linear = {
        f"{name}.weight": tuple(module.weight.shape)
        for name, module in model_of(config).named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    }
    scoped = scoped_tensors(config)
    assert dict(scoped) == linear
    layers = [layer_of(name) for name, _ in scoped]
    assert layers == sorted(layer for layer in layers if layer is not None)
    attention, mlp = scoped_tensors(config, "attention"), scoped_tensors(config, "mlp")
    assert all("attn" in name or "attention" in name for name, _ in attention)
    assert not any("attn" in name or "attention" in name for name, _ in mlp)
    assert [item for item in scoped if item in attention] == list(attention)
    assert len(attention) + len(mlp) == len(scoped)


def test_every_family_has_a_case() -> None:
    assert {family for family, _ in CASES} == set(Family)


def test_order_within_a_block_is_the_familys_order() -> None:
    names = [name.split(".")[4] for name, _ in scoped_tensors(config_of("llama", {}), "layers:0")]
    assert names == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("scope", "layers"),
    [("all", {0, 1, 2}), ("layers:1-", {1, 2}), ("layers:0-1", {0, 1}), ("layers:2", {2})],
)
def test_scope_selects_a_range_of_layers(scope: str, layers: set[int]) -> None:
    assert {layer_of(name) for name, _ in scoped_tensors(config_of("llama", {}), scope)} == layers
    assert re.fullmatch(SCOPE_PATTERN, scope)


@pytest.mark.parametrize(
    "scope", ["", "MLP", "layers", *(f"layers:{part}" for part in ("", "-2", "3-", "0-3", "2-1", "a", "٣"))]
)
def test_scope_of_another_form_is_refused(scope: str) -> None:
    with pytest.raises(InputError, match="scope"):
        scoped_tensors(config_of("llama", {}), scope)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_bigcode", "", None, 7, ["llama"], {}])
def test_unknown_family_is_refused_with_the_list(model_type: Any) -> None:
    with pytest.raises(
        InputError,
        match=r"llama, mistral, qwen2, .*gpt_neox, smollm3, granite, olmo2, olmo3, exaone4, phi3, ministral3",
    ):
        family_of({"model_type": model_type})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "qwen2_moe"}, "mixture of experts"),
        ({"model_type": "llama", "num_experts": 4}, "mixture of experts"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
            r"already quantized .gptq.",
        ),
        ({"model_type": "own", "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"model_type": "lfm2"}, "convolutions"),
    ],
)
def test_models_of_another_kind_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        family_of(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", bad) for bad in (None, "32", 32.0, True)),
        *(("vocab_size", bad) for bad in (0, 1 << 40)),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 5),
        ("num_key_value_heads", 3),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_a_config_number_out_of_its_type_or_range_is_refused(key: str, value: Any) -> None:
    config = config_of("llama", {"head_dim": None}) | {"head_dim": None, key: value}
    with pytest.raises(InputError, match=r"in config\.json"):
        expected_tensors(config)


def test_silence_about_key_value_heads_is_refused_where_the_default_is_another_number() -> None:
    config = config_of("mistral", {})
    del config["num_key_value_heads"]
    with pytest.raises(InputError, match="num_key_value_heads"):
        expected_tensors(config)


def test_old_checkpoint_names_are_mapped_and_buffers_dropped() -> None:
    neox, opt, tied = config_of("gpt_neox", {}), config_of("opt", _OPT), config_of("gemma", {"head_dim": 8})
    assert canonical_name(neox, "embed_out.weight") == "lm_head.weight"
    assert canonical_name(neox, "gpt_neox.layers.0.attention.bias") is None
    assert canonical_name(neox, "gpt_neox.layers.0.attention.rotary_emb.inv_freq") is None
    kept = "gpt_neox.layers.0.attention.dense.bias"
    assert canonical_name(neox, kept) == kept
    assert canonical_name(opt, "decoder.layers.0.fc1.weight") == "model.decoder.layers.0.fc1.weight"
    assert canonical_name(tied, "lm_head.weight") is None
    assert canonical_name(neox, "lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 2048),
        ({"max_position_embeddings": None}, 2048),
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 10**12}, 2048),
    ],
)
def test_sequences_are_no_longer_than_the_positions_of_a_model(config: dict[str, Any], length: int) -> None:
    assert within_positions(config, 2048) == length


@pytest.mark.parametrize("value", [0, -1, 1.5, "512", [512], True])
def test_positions_that_are_no_whole_number_are_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"max_position_embeddings in config\.json must be a whole number"):
        within_positions({"max_position_embeddings": value}, 2048)
