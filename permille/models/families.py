"""The model families we know: linear layers in scope, all tensors of a checkpoint; from `config.json` alone.

Tensor names are those of the state dict of transformers 5; `canonical_name` maps older checkpoints to them.
A config is foreign input here: every number is checked before it becomes a shape. No torch, no file access.

Shapes are those of the weight itself: a linear layer is (N, K) = (out_features, in_features).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from permille.choices import choice_of
from permille.errors import InputError

Config = Mapping[str, Any]
Shape = tuple[int, ...]


class Family(StrEnum):
    """Values are the `model_type` of `config.json`."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    OPT = "opt"
    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3_TEXT = "gemma3_text"
    GPT_NEOX = "gpt_neox"


# Keys that mark a mixture of experts in the configs of the hub, whatever the model_type says.
_EXPERT_KEYS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
)
_EXPERT_TYPES = (
    "mixtral",
    "phimoe",
    "dbrx",
    "jamba",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "llama4_text",
)

# Bounds far above any published model and far below an overflow of the sizes computed from them.
_LARGEST_LAYERS = 4096
_LARGEST_WIDTH = 1 << 24


def family_of(config: Config) -> Family:
    """The family of a `config.json`.

    Raises:
        InputError: unknown family (with the list of known ones), mixture of experts, an already quantized
            model, or a config that asks for code of its own (`auto_map`).
    """
    model_type = config.get("model_type")
    if config.get("quantization_config") is not None:
        raise InputError(f"expected a model in full precision, got one already quantized ({_method(config)})")
    if "auto_map" in config:
        raise InputError("expected a built-in architecture, got a config with auto_map (code of its own)")
    if _is_mixture(config):
        raise InputError(f"expected dense layers, got a mixture of experts (model_type {model_type!r})")
    return choice_of(Family, str(model_type), "a model_type")


def expected_tensors(config: Config) -> dict[str, Shape]:
    """Name and shape of every tensor of a checkpoint of this config; `lm_head.weight` is absent when tied.

    Order: embeddings, blocks by index with the scoped layers first, final norm, head.

    Raises:
        InputError: as `family_of`, or a number in the config that is missing, no integer or out of range.
    """
    layout = _LAYOUTS[family_of(config)](config)
    tensors = dict(layout.before)
    for index in range(layout.layers):
        tensors |= {
            f"{layout.prefix}.{index}.{name}": shape for name, shape in (layout.linear | layout.other).items()
        }
    return tensors | layout.after


def scoped_tensors(config: Config, scope: str = "all") -> tuple[tuple[str, tuple[int, int]], ...]:
    """The linear layers that a mask may cover, in tensor_id order: by layer, then in the family's order.

    `scope` is "all", "attention", "mlp", or a range of layers from 0, both ends included: "layers:11-",
    "layers:4-7", "layers:3".

    Raises:
        InputError: as `expected_tensors`, or a scope of another form or outside the model's layers.
    """
    layout = _LAYOUTS[family_of(config)](config)
    linear, layers = layout.linear, range(layout.layers)
    if scope in ("attention", "mlp"):
        linear = {name: shape for name, shape in linear.items() if _part_of(name) == scope}
    else:
        layers = _layers_in(scope, layout.layers)
    return tuple(
        (f"{layout.prefix}.{index}.{name}", shape) for index in layers for name, shape in linear.items()
    )


def layer_of(name: str) -> int | None:
    """The block's index in a canonical tensor name, or None for a tensor outside the blocks."""
    _, found, rest = name.partition("layers.")
    return int(rest.split(".", 1)[0]) if found else None


def is_tied(config: Config) -> bool:
    """Whether the output head shares the embedding, with the family's default where the config is silent."""
    return _flag(config, "tie_word_embeddings", default=family_of(config) in _TIED_BY_DEFAULT)


def canonical_name(config: Config, name: str) -> str | None:
    """Today's name of a tensor in a published checkpoint; None for one that is not part of the model.

    Dropped: rotary and causal-mask buffers of old checkpoints, and a stored copy of a tied head.
    """
    family = family_of(config)
    if name.endswith((".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")):
        return None
    if family is Family.GPT_NEOX and name == "embed_out.weight":
        name = "lm_head.weight"
    if family is Family.OPT and name.startswith("decoder."):
        name = f"model.{name}"
    return None if name == "lm_head.weight" and is_tied(config) else name


# --- one layout a family ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Names inside a block are relative to `<prefix>.<layer index>.`."""

    prefix: str
    layers: int
    linear: dict[str, tuple[int, int]]
    other: dict[str, Shape]
    before: dict[str, Shape]
    after: dict[str, Shape]


def _llama_like(config: Config) -> _Layout:
    """Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3: one block, with differences in biases and norms."""
    family = family_of(config)
    hidden, inner, vocabulary = (
        _size(config, key) for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads = _size(config, "num_attention_heads")
    kv_heads = _kv_heads(config, family, heads)
    head = _head_dim(config, family, hidden, heads)
    linear = {
        "self_attn.q_proj.weight": (heads * head, hidden),
        "self_attn.k_proj.weight": (kv_heads * head, hidden),
        "self_attn.v_proj.weight": (kv_heads * head, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family in (Family.GEMMA2, Family.GEMMA3_TEXT):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    other: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in norms}
    if family in (Family.QWEN3, Family.GEMMA3_TEXT):
        other |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return _Layout(
        prefix="model.layers",
        layers=_size(config, "num_hidden_layers", largest=_LARGEST_LAYERS),
        linear=linear,
        other=other | _biases(linear, _llama_biased(config, family)),
        before={"model.embed_tokens.weight": (vocabulary, hidden)},
        after={"model.norm.weight": (hidden,)} | _head(config, vocabulary, hidden),
    )


def _opt(config: Config) -> _Layout:
    hidden, inner, vocabulary = _sizes(config, "hidden_size", "ffn_dim", "vocab_size")
    positions = _size(config, "max_position_embeddings")
    embedded = _size(config, "word_embed_proj_dim", default=hidden)
    _divides(hidden, _size(config, "num_attention_heads"))
    linear = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (hidden, hidden),
        "self_attn.v_proj.weight": (hidden, hidden),
        "self_attn.out_proj.weight": (hidden, hidden),
        "fc1.weight": (inner, hidden),
        "fc2.weight": (hidden, inner),
    }
    affine = _flag(config, "layer_norm_elementwise_affine", default=True)
    normed_last = _flag(config, "do_layer_norm_before", default=True) and not _flag(
        config, "_remove_final_layer_norm", default=False
    )
    # 2: OPT's position embedding keeps two rows before position 0.
    before: dict[str, Shape] = {
        "model.decoder.embed_tokens.weight": (vocabulary, embedded),
        "model.decoder.embed_positions.weight": (positions + 2, hidden),
    }
    if embedded != hidden:
        before |= {"model.decoder.project_in.weight": (hidden, embedded)}
        before |= {"model.decoder.project_out.weight": (embedded, hidden)}
    return _Layout(
        prefix="model.decoder.layers",
        layers=_size(config, "num_hidden_layers", largest=_LARGEST_LAYERS),
        linear=linear,
        other=(_norm("self_attn_layer_norm", hidden) | _norm("final_layer_norm", hidden) if affine else {})
        | (_biases(linear, tuple(linear)) if _flag(config, "enable_bias", default=True) else {}),
        before=before,
        after=(_norm("model.decoder.final_layer_norm", hidden) if affine and normed_last else {})
        | _head(config, vocabulary, embedded),
    )


def _gpt_neox(config: Config) -> _Layout:
    hidden, inner, vocabulary = (
        _size(config, key) for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    _divides(hidden, _size(config, "num_attention_heads"))
    linear = {
        "attention.query_key_value.weight": (3 * hidden, hidden),
        "attention.dense.weight": (hidden, hidden),
        "mlp.dense_h_to_4h.weight": (inner, hidden),
        "mlp.dense_4h_to_h.weight": (hidden, inner),
    }
    attention_biased = _flag(config, "attention_bias", default=True)
    biased = tuple(name for name in linear if attention_biased or name.startswith("mlp."))
    return _Layout(
        prefix="gpt_neox.layers",
        layers=_size(config, "num_hidden_layers", largest=_LARGEST_LAYERS),
        linear=linear,
        other=_norm("input_layernorm", hidden)
        | _norm("post_attention_layernorm", hidden)
        | _biases(linear, biased),
        before={"gpt_neox.embed_in.weight": (vocabulary, hidden)},
        after=_norm("gpt_neox.final_layer_norm", hidden) | _head(config, vocabulary, hidden),
    )


_LAYOUTS: dict[Family, Callable[[Config], _Layout]] = dict.fromkeys(Family, _llama_like) | {
    Family.OPT: _opt,
    Family.GPT_NEOX: _gpt_neox,
}
_TIED_BY_DEFAULT = (Family.GEMMA, Family.GEMMA2, Family.GEMMA3_TEXT, Family.OPT)


# --- parts -----------------------------------------------------------------------------------------------


def _llama_biased(config: Config, family: Family) -> tuple[str, ...]:
    qkv = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
    if family is Family.QWEN2:
        return qkv
    biased: tuple[str, ...] = ()
    if family is not Family.MISTRAL and _flag(config, "attention_bias", default=False):
        biased += (*qkv, "self_attn.o_proj.weight")
    if family is Family.LLAMA and _flag(config, "mlp_bias", default=False):
        biased += tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    return biased


def _kv_heads(config: Config, family: Family, heads: int) -> int:
    # Only Llama's own default is "as many as heads"; another family's silence could mean another number.
    default = heads if family is Family.LLAMA or "num_key_value_heads" in config else None
    kv_heads = _size(config, "num_key_value_heads", default=default)
    if heads % kv_heads:
        raise InputError(f"expected a multiple of {kv_heads} key-value heads, got {heads} heads")
    return kv_heads


def _head_dim(config: Config, family: Family, hidden: int, heads: int) -> int:
    fixed = {Family.QWEN3: 128, Family.GEMMA: 256, Family.GEMMA2: 256, Family.GEMMA3_TEXT: 256}.get(family)
    if fixed is None and config.get("head_dim") is None:
        _divides(hidden, heads)
    return _size(config, "head_dim", default=fixed or hidden // heads)


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _biases(linear: dict[str, tuple[int, int]], biased: tuple[str, ...]) -> dict[str, Shape]:
    return {f"{name.removesuffix('.weight')}.bias": (linear[name][0],) for name in biased}


def _head(config: Config, vocabulary: int, width: int) -> dict[str, Shape]:
    return {} if is_tied(config) else {"lm_head.weight": (vocabulary, width)}


# --- reading foreign numbers -----------------------------------------------------------------------------


def _size(config: Config, key: str, *, default: int | None = None, largest: int = _LARGEST_WIDTH) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise InputError(f"expected {key} to be a whole number from 1 to {largest}, got {value!r}")
    return value


def _sizes(config: Config, *keys: str) -> tuple[int, ...]:
    return tuple(_size(config, key) for key in keys)


def _flag(config: Config, key: str, *, default: bool) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise InputError(f"expected {key} to be true or false, got {value!r}")
    return value


def _divides(hidden: int, heads: int) -> None:
    if hidden % heads:
        raise InputError(f"expected hidden_size to be a multiple of {heads} heads, got {hidden}")


def _part_of(name: str) -> str:
    return "attention" if name.startswith(("self_attn.", "attention.")) else "mlp"


def _layers_in(scope: str, layers: int) -> range:
    if scope == "all":
        return range(layers)
    form, _, bounds = scope.partition(":")
    first, dash, last = bounds.partition("-")
    if form != "layers" or not _is_index(first) or (last != "" and not _is_index(last)):
        raise InputError(
            f"expected scope all, attention, mlp, layers:4-7, layers:4- or layers:4, got {scope!r}"
        )
    start = int(first)
    stop = (int(last) + 1 if last else layers) if dash else start + 1
    if not start < stop <= layers:
        raise InputError(f"expected scope inside layers 0 to {layers - 1}, got {scope!r}")
    return range(start, stop)


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5


def _is_mixture(config: Config) -> bool:
    model_type = str(config.get("model_type"))
    counted = any(isinstance(config.get(key), int) and config[key] > 0 for key in _EXPERT_KEYS)
    return counted or "moe" in model_type.lower() or model_type in _EXPERT_TYPES


def _method(config: Config) -> str:
    quantization = config["quantization_config"]
    return (
        str(quantization.get("quant_method", "unnamed")) if isinstance(quantization, Mapping) else "unnamed"
    )
