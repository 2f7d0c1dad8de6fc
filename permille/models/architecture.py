"""What a decoder computes, from its config alone: one description for all families that the engine knows.

Every family is a block of norms, attention and a feed-forward part; they differ in where the norms stand, in
windows, rotations, biases, soft caps and scales. Names of tensors are those of
`permille.models.families`. The defaults are transformers 5's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from permille.models.families import Family, family_of, is_tied
from permille.models.rope import Rope, rope_of
from permille.models.settings import Settings, unsupported


class NormKind(StrEnum):
    """RMS: `w x / rms(x)`; RMS_PLUS_ONE: `(1 + w) x / rms(x)` (Gemma); LAYER: mean removed, with a bias."""

    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"
    LAYER = "layer"


class Activation(StrEnum):
    """The pointwise function of the feed-forward part."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


class BlockKind(StrEnum):
    """Where the norms stand.

    PRE: `x += f(norm(x))`, twice. SANDWICH: `x += norm(f(norm(x)))`. POST: `x = norm(x + f(x))`. PARALLEL:
    both parts read the block's input.
    """

    PRE = "pre"
    SANDWICH = "sandwich"
    POST = "post"
    PARALLEL = "parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """Names inside a block, without `.weight`; None: the family has no such tensor."""

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    fused: str | None = None
    output: str = "self_attn.o_proj"
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    norm_attention: str | None = "input_layernorm"
    norm_attention_out: str | None = None
    norm_mlp: str | None = "post_attention_layernorm"
    norm_mlp_out: str | None = None
    norm_query: str | None = None
    norm_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings:
    """What may differ from layer to layer: how far back attention looks, and the rotation."""

    window: int | None
    rope: Rope | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder.

    Attributes:
        positions: the longest sequence.
        learned_positions: rows before position 0 in the table of learned positions, or None without one.
    """

    family: Family
    prefix: str
    layers: tuple[LayerSettings, ...]
    heads: int
    kv_heads: int
    head: int
    positions: int
    block: BlockKind
    norm: NormKind
    norm_epsilon: float
    activation: Activation
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    learned_positions: int | None = None
    names: BlockNames = BlockNames()
    embedding: str = "model.embed_tokens"
    final_norm: str | None = "model.norm"
    tied: bool


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The decoder of a config whose shapes were checked (`expected_tensors`).

    Raises:
        InputError: a family, key or value whose mathematics this engine does not have; the message says that
            the torch engine may.
    """
    family = family_of(config)
    settings = Settings(config)
    settings.require("use_bidirectional_attention", False)
    found = _FAMILIES[family](settings, family)
    settings.flag("tie_word_embeddings", False)
    for key in ("hidden_size", "vocab_size", "intermediate_size", "ffn_dim"):
        settings.size(key, 1)
    settings.check_all_read()
    return replace(found, tied=is_tied(config))


def _llama(settings: Settings, family: Family) -> Architecture:
    hidden, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    head = settings.size("head_dim", _HEAD_DEFAULTS.get(family) or hidden // heads)
    count, positions = settings.size("num_hidden_layers"), settings.size("max_position_embeddings", 0)
    # Biases are found by the tensors that the package holds.
    settings.flag("attention_bias", False)
    settings.flag("mlp_bias", False)
    normed = family in (Family.QWEN3, Family.GEMMA3_TEXT)
    names = BlockNames(
        norm_query="self_attn.q_norm" if normed else None, norm_key="self_attn.k_norm" if normed else None
    )
    rope = None if family is Family.GEMMA3_TEXT else _rope(settings, head, positions)
    return Architecture(
        family=family,
        prefix="model.layers",
        layers=tuple(LayerSettings(window=window, rope=rope) for window in _windows(settings, family, count)),
        heads=heads,
        kv_heads=settings.size("num_key_value_heads", heads),
        head=head,
        positions=positions,
        block=BlockKind.PRE,
        norm=NormKind.RMS,
        norm_epsilon=settings.number("rms_norm_eps", 1e-6),
        activation=_activation(settings, "hidden_act", "silu") if family in _SILU else Activation.GELU_TANH,
        attention_scale=head**-0.5,
        names=names,
        tied=False,
    )


def _gemma(settings: Settings, family: Family) -> Architecture:
    found = _llama(settings, family)
    key = "hidden_act" if family is Family.GEMMA else "hidden_activation"
    activation = _activation(settings, key, "gelu_pytorch_tanh")
    if family is Family.GEMMA and activation is Activation.GELU:
        activation = Activation.GELU_TANH  # transformers: the first releases' "gelu" means the tanh form.
    settings.require("hidden_activation" if family is Family.GEMMA else "hidden_act", "gelu_pytorch_tanh")
    found = replace(
        found,
        norm=NormKind.RMS_PLUS_ONE,
        activation=activation,
        embedding_scale=float(settings.size("hidden_size") ** 0.5),
    )
    if family is Family.GEMMA:
        return found
    names = replace(
        found.names,
        norm_attention_out="post_attention_layernorm",
        norm_mlp="pre_feedforward_layernorm",
        norm_mlp_out="post_feedforward_layernorm",
    )
    softcaps = family is Family.GEMMA2
    if not softcaps:
        settings.require("attn_logit_softcapping")
    return replace(
        found,
        block=BlockKind.SANDWICH,
        names=names,
        attention_scale=settings.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=settings.optional_number("attn_logit_softcapping", 50.0) if softcaps else None,
        final_softcap=settings.optional_number("final_logit_softcapping", 30.0 if softcaps else None),
    )


def _gemma3(settings: Settings, family: Family) -> Architecture:
    found = _gemma(settings, family)
    given = settings.table("rope_parameters")
    if given.keys() - {"full_attention", "sliding_attention"}:
        raise unsupported("rope_parameters by layer type", sorted(given))
    full = {"rope_theta": settings.number("rope_theta", 1e6)} | dict(given.get("full_attention") or {})
    full |= settings.table("rope_scaling")
    near = {"rope_theta": settings.number("rope_local_base_freq", 1e4)}
    near |= dict(given.get("sliding_attention") or {})
    for parameters in (full, near):
        if parameters.get("rope_type", parameters.get("type", "default")) not in ("default", "linear"):
            raise unsupported("gemma3_text with rope type default or linear", parameters)
        if parameters.get("partial_rotary_factor") is not None:
            raise unsupported("gemma3_text without partial_rotary_factor", parameters)
    settings.require("partial_rotary_factor", 1.0)
    ropes = [rope_of(parameters, head=found.head, positions=found.positions) for parameters in (full, near)]
    layers = tuple(
        replace(layer, rope=ropes[0] if layer.window is None else ropes[1]) for layer in found.layers
    )
    return replace(found, layers=layers)


def _opt(settings: Settings, family: Family) -> Architecture:
    hidden, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    before = settings.flag("do_layer_norm_before", True)
    removed = settings.flag("_remove_final_layer_norm", False)
    settings.flag("enable_bias", True)
    settings.flag("layer_norm_elementwise_affine", True)
    settings.size("word_embed_proj_dim", hidden)
    return Architecture(
        family=family,
        prefix="model.decoder.layers",
        layers=(LayerSettings(window=None, rope=None),) * settings.size("num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head=hidden // heads,
        positions=settings.size("max_position_embeddings"),
        block=BlockKind.PRE if before else BlockKind.POST,
        norm=NormKind.LAYER,
        norm_epsilon=1e-5,
        activation=_activation(settings, "activation_function", "relu"),
        attention_scale=(hidden // heads) ** -0.5,
        learned_positions=2,
        names=BlockNames(
            output="self_attn.out_proj",
            gate=None,
            up="fc1",
            down="fc2",
            norm_attention="self_attn_layer_norm",
            norm_mlp="final_layer_norm",
        ),
        embedding="model.decoder.embed_tokens",
        final_norm="model.decoder.final_layer_norm" if before and not removed else None,
        tied=False,
    )


def _gpt_neox(settings: Settings, family: Family) -> Architecture:
    hidden, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    positions = settings.size("max_position_embeddings", 2048)
    parameters = settings.table("rope_parameters") | settings.table("rope_scaling")
    parameters = {
        "rope_theta": settings.number("rotary_emb_base", 1e4),
        "partial_rotary_factor": settings.number("rotary_pct", 0.25),
    } | parameters
    settings.flag("attention_bias", True)
    rope = rope_of(parameters, head=hidden // heads, positions=positions)
    return Architecture(
        family=family,
        prefix="gpt_neox.layers",
        layers=(LayerSettings(window=None, rope=rope),) * settings.size("num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head=hidden // heads,
        positions=positions,
        block=BlockKind.PARALLEL if settings.flag("use_parallel_residual", True) else BlockKind.PRE,
        norm=NormKind.LAYER,
        norm_epsilon=settings.number("layer_norm_eps", 1e-5),
        activation=_activation(settings, "hidden_act", "gelu"),
        attention_scale=(hidden // heads) ** -0.5,
        names=BlockNames(
            fused="attention.query_key_value",
            output="attention.dense",
            gate=None,
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        tied=False,
    )


_FAMILIES: Mapping[Family, Callable[[Settings, Family], Architecture]] = {
    Family.LLAMA: _llama,
    Family.MISTRAL: _llama,
    Family.QWEN2: _llama,
    Family.QWEN3: _llama,
    Family.GEMMA: _gemma,
    Family.GEMMA2: _gemma,
    Family.GEMMA3_TEXT: _gemma3,
    Family.OPT: _opt,
    Family.GPT_NEOX: _gpt_neox,
}
_SILU = (Family.LLAMA, Family.MISTRAL, Family.QWEN2, Family.QWEN3)
_HEAD_DEFAULTS = {Family.QWEN3: 128, Family.GEMMA: 256, Family.GEMMA2: 256, Family.GEMMA3_TEXT: 256}
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def _activation(settings: Settings, key: str, default: str) -> Activation:
    name = settings.text(key, default)
    if name not in _ACTIVATIONS:
        raise unsupported(f"{key} to be one of {', '.join(_ACTIVATIONS)}", name)
    return _ACTIVATIONS[name]


def _rope(settings: Settings, head: int, positions: int) -> Rope:
    """One rotation for all layers. `rope_scaling` is the old name of `rope_parameters`, and goes first."""
    parameters = settings.table("rope_scaling") or settings.table("rope_parameters")
    settings.table("rope_parameters")
    settings.require("partial_rotary_factor", 1.0)
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise unsupported("rotation of whole heads in this family", parameters)
    parameters.setdefault("rope_theta", settings.number("rope_theta", 1e4))
    settings.number("rope_theta", 1e4)
    return rope_of(parameters, head=head, positions=positions)


def _windows(settings: Settings, family: Family, count: int) -> tuple[int | None, ...]:
    """How many tokens each layer attends to, itself included; None: all before it."""
    if family in (Family.LLAMA, Family.GEMMA):
        return (None,) * count
    if family is Family.MISTRAL:
        return (settings.optional_size("sliding_window", 4096),) * count
    window = settings.optional_size("sliding_window", 4096)
    if family in (Family.QWEN2, Family.QWEN3):
        first = settings.size("max_window_layers", 28, least=0)
        if not settings.flag("use_sliding_window", False):
            window = None
        near = tuple(window is not None and layer >= first for layer in range(count))
    else:
        pattern = 2 if family is Family.GEMMA2 else settings.size("sliding_window_pattern", 6)
        near = tuple(bool((layer + 1) % pattern) for layer in range(count))
    kinds = settings.texts("layer_types")
    if kinds is not None:
        if len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
            raise unsupported(f"{count} layer_types, full_attention or sliding_attention", kinds)
        near = tuple(kind == "sliding_attention" for kind in kinds)
    if any(near) and window is None:
        raise unsupported("a sliding_window for layers of sliding_attention", window)
    return tuple(window if is_near else None for is_near in near)
