"""The mathematics of a decoder, from its config and the description of its family.

    architecture = architecture_of({"model_type": "llama", ...})

The light engine runs without transformers, so it computes what the `Architecture` says. `families` reads the
shapes of the tensors. A config that needs unknown mathematics is refused, and the error names the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from permille.models.descriptions import BlockKind, BlockNames, Family, NormKind, Rotation, Windows
from permille.models.families import ModelShape, shape_of
from permille.models.rope import Rope, rope_of
from permille.models.settings import Settings, unsupported


class Activation(StrEnum):
    """The pointwise function of the feed-forward part."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings:
    """Settings that may differ between layers: attention window and rotary embedding."""

    window: int | None
    rope: Rope | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder.

    Attributes:
        head: the width of an attention head.
        positions: the length of the longest sequence.
        stacked: whether one matrix has the rows of query, then key, then value, and another one has the rows
            of gate, then up.
        residual_scale: factor of the outputs of attention and of the feed-forward part.
        logits_scale: factor of the logits.
        learned_positions: rows before position 0 in the table of learned positions, or None without a table.
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
    names: BlockNames
    stacked: bool
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    learned_positions: int | None = None
    embedding: str = "model.embed_tokens"
    final_norm: str | None = "model.norm"
    tied: bool


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the decoder of a config.

    Raises:
        InputError: a shape does not fit, or a key or value needs mathematics that is not supported. The
            message says that the torch engine may support it.
    """
    shape, settings = shape_of(config), Settings(config)
    about = shape.about
    # `shape_of` has already checked these keys. A family uses only one of `intermediate_size` and `ffn_dim`.
    settings.passed_over(shape.keys | {"tie_word_embeddings", "intermediate_size", "ffn_dim"})
    # The engine's attention is causal: a token never attends to a later one.
    settings.require("use_bidirectional_attention", False)
    learned = about.rotation is Rotation.LEARNED
    # Only a config of GPT-NeoX may lack this key.
    positions = settings.size("max_position_embeddings", 2048 if about.rotation is Rotation.PART else None)
    # Attention scores are multiplied by `scalar ** -0.5`. The scalar is the width of a head. Only Gemma 2 and
    # 3 have a key for another scalar, and Granite has a key for the factor itself.
    scalar, attention_softcap, final_softcap = float(shape.head), None, None
    if about.query_scalar is not None:
        scalar = settings.number("query_pre_attn_scalar", about.query_scalar)
        final_softcap = settings.optional_number("final_logit_softcapping", about.final_softcap)
        if about.attention_softcap is None:
            # Gemma 3 inherits the key from Gemma 2, but has no soft cap.
            settings.require("attn_logit_softcapping")
        else:
            attention_softcap = settings.optional_number("attn_logit_softcapping", about.attention_softcap)
    scale, embedding_scale = scalar**-0.5, float(shape.hidden**0.5) if about.embedding_scaled else 1.0
    residual_scale = logits_scale = 1.0
    if about.multiplied:
        # The config of Granite states the factor of the scores. It does not depend on the width of a head.
        scale = settings.number("attention_multiplier", 1.0)
        embedding_scale = settings.number("embedding_multiplier", 1.0)
        residual_scale = settings.number("residual_multiplier", 1.0)
        logits_scale = 1 / settings.number("logits_scaling", 1.0)
    layers = _layers(settings, shape, positions)
    limits = [
        layer.rope.longest for layer in layers if layer.rope is not None and layer.rope.longest is not None
    ]
    found = Architecture(
        family=shape.family,
        prefix=about.prefix,
        layers=layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head=shape.head,
        # Beyond the smallest limit, a layer would need other rotary frequencies, so engines refuse longer
        # sequences.
        positions=min([positions, *limits]),
        block=_block(settings, shape),
        norm=about.norm,
        # A config of OPT has no key for epsilon. The model uses torch's default.
        norm_epsilon=1e-5 if learned else settings.number(*about.norm_epsilon),
        activation=_activation(settings, shape),
        attention_scale=scale,
        attention_softcap=attention_softcap,
        final_softcap=final_softcap,
        embedding_scale=embedding_scale,
        residual_scale=residual_scale,
        logits_scale=logits_scale,
        learned_positions=2 if learned else None,
        names=about.names,
        stacked=about.stacked,
        embedding=about.embedding,
        final_norm=about.final_norm if shape.normed_last else None,
        tied=shape.tied,
    )
    settings.check_all_read()
    return found


def _block(settings: Settings, shape: ModelShape) -> BlockKind:
    # OPT-350m, for example, normalizes after each part.
    if shape.family is Family.OPT and not settings.flag("do_layer_norm_before", True):
        return BlockKind.POST
    if shape.family is Family.GPT_NEOX and not settings.flag("use_parallel_residual", True):
        return BlockKind.PRE
    return shape.about.block


_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def _activation(settings: Settings, shape: ModelShape) -> Activation:
    key, default = shape.about.activation
    name = settings.text(key, default)
    if name not in _ACTIVATIONS:
        raise unsupported(f"{key} to be one of {', '.join(_ACTIVATIONS)}", name)
    if shape.about.embedding_scaled:  # Gemma has two keys for the activation, and ignores one.
        # The ignored key may only be absent, null or the usual value.
        settings.require("hidden_activation" if key == "hidden_act" else "hidden_act", "gelu_pytorch_tanh")
    if shape.family is Family.GEMMA and name == "gelu":
        return Activation.GELU_TANH  # as in transformers: Gemma's first configs say "gelu" for this function
    return _ACTIVATIONS[name]


def _layers(settings: Settings, shape: ModelShape, positions: int) -> tuple[LayerSettings, ...]:
    windows = _windows(settings, shape)
    if shape.about.rotation is Rotation.BY_LAYER:
        everywhere, near = _ropes_by_layer(settings, shape, positions)
        ropes: list[Rope | None] = [everywhere if window is None else near for window in windows]
    elif shape.about.rotation is Rotation.LEARNED:
        ropes = [None] * shape.layers
    else:
        rope, rotated = _rope(settings, shape, positions), _rotated(settings, shape, windows)
        ropes = [rope if each else None for each in rotated]
    return tuple(LayerSettings(window=window, rope=rope) for window, rope in zip(windows, ropes, strict=True))


def _rotated(settings: Settings, shape: ModelShape, windows: tuple[int | None, ...]) -> list[bool]:
    """Return for each layer whether it rotates queries and keys."""
    if shape.about.rotation is Rotation.WINDOWED and any(window is not None for window in windows):
        return [window is not None for window in windows]
    if shape.about.rotation is not Rotation.SOME:
        return [True] * shape.layers
    interval = settings.size("no_rope_layer_interval", 4)
    flags = settings.flags("no_rope_layers")
    if flags is None:
        # transformers fills in a missing list by this rule.
        flags = [bool((layer + 1) % interval) for layer in range(shape.layers)]
    if len(flags) < shape.layers:
        raise unsupported(f"{shape.layers} no_rope_layers", flags)
    return flags[: shape.layers]


def _rope(settings: Settings, shape: ModelShape, positions: int) -> Rope:
    """Read the rotation that all rotated layers share.

    `rope_scaling` is the old name of `rope_parameters` and takes precedence.
    """
    given, scaling = settings.table("rope_parameters"), settings.table("rope_scaling")
    if shape.about.rotation is Rotation.PART:
        parameters = {
            "rope_theta": settings.number("rotary_emb_base", 1e4),
            "partial_rotary_factor": settings.number("rotary_pct", 0.25),
        }
        # Old configs of GPT-NeoX have the two keys above. A table, as in newer configs, takes precedence.
        return rope_of(parameters | given | scaling, head=shape.head, positions=positions)
    parameters = scaling or given
    if shape.family is Family.MINISTRAL3 and "llama_4_scaling_beta" not in parameters:
        # Without this key, transformers uses a default that is not supported here.
        raise unsupported("rope_parameters with llama_4_scaling_beta", parameters)
    if shape.about.rotation is Rotation.SHARE:
        parameters.setdefault("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0))
        context = settings.size("original_max_position_embeddings", 4096)
        if "long_factor" in parameters:  # as in transformers, where the key outside the table wins
            parameters["original_max_position_embeddings"] = context
        parameters.setdefault("rope_theta", settings.number("rope_theta", shape.about.theta))
        return rope_of(parameters, head=shape.head, positions=positions)
    settings.require("partial_rotary_factor", 1.0)
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise unsupported("rotation of whole heads in this family", parameters)
    parameters.setdefault("rope_theta", settings.number("rope_theta", shape.about.theta))
    return rope_of(parameters, head=shape.head, positions=positions)


def _ropes_by_layer(settings: Settings, shape: ModelShape, positions: int) -> list[Rope]:
    """Return the frequencies of layers with full attention, then of layers with a window."""
    given = settings.table("rope_parameters")
    if given.keys() - {"full_attention", "sliding_attention"}:
        raise unsupported("rope_parameters by layer type", sorted(given))
    key, theta = shape.about.near_theta
    full = {"rope_theta": settings.number("rope_theta", shape.about.theta)}
    full |= dict(given.get("full_attention") or {})
    # `rope_scaling`, the older key, applies only to layers with full attention.
    full |= settings.table("rope_scaling")
    near = {"rope_theta": theta if key is None else settings.number(key, theta)}
    near |= dict(given.get("sliding_attention") or {})
    for parameters in (full, near):
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if shape.family is Family.GEMMA3_TEXT and kind not in ("default", "linear"):
            raise unsupported("gemma3_text with rope type default or linear", parameters)
        if parameters.get("partial_rotary_factor") is not None:
            raise unsupported(f"{shape.family} without partial_rotary_factor", parameters)
    settings.require("partial_rotary_factor", 1.0)
    return [rope_of(parameters, head=shape.head, positions=positions) for parameters in (full, near)]


_NO_WINDOW = (Family.PHI3, Family.MINISTRAL3)  # families without a window by default


def _windows(settings: Settings, shape: ModelShape) -> tuple[int | None, ...]:
    """Return each layer's attention window in tokens. It counts the token itself. None means no limit."""
    kind, count = shape.about.windows, shape.layers
    if kind is Windows.NONE:
        # SmolLM3 uses the keys for windows only if `use_sliding_window` is set.
        if shape.about.rotation is Rotation.SOME:
            settings.require("use_sliding_window", False)
            settings.passed_over(("sliding_window", "layer_types"))
        return (None,) * count
    # 4096 is the default of transformers for every other family with a window.
    window = settings.optional_size("sliding_window", None if shape.family in _NO_WINDOW else 4096)
    if kind is Windows.ALL:
        return (window,) * count
    kinds = settings.texts("layer_types")
    if kind is Windows.UPPER:
        # 28 is the default of transformers.
        first = settings.size("max_window_layers", 28, least=0)
        if not settings.flag("use_sliding_window", False):
            window = None
        near = tuple(window is not None and layer >= first for layer in range(count))
    else:
        pattern = shape.about.window_pattern
        if kinds is not None:
            # `layer_types` gives the type of each layer, so the pattern is ignored.
            settings.passed_over(("sliding_window_pattern",))
        elif shape.family in (Family.GEMMA3_TEXT, Family.EXAONE4):
            pattern = settings.size("sliding_window_pattern", pattern)
        near = tuple(bool((layer + 1) % pattern) for layer in range(count))
    if kinds is not None:
        if len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
            raise unsupported(f"{count} layer_types, full_attention or sliding_attention", kinds)
        # The list replaces the rule of UPPER or of the pattern.
        near = tuple(kind == "sliding_attention" for kind in kinds)
    if any(near) and window is None:
        raise unsupported("a sliding_window for layers of sliding_attention", window)
    return tuple(window if is_near else None for is_near in near)
