"""Descriptions of model families. One record describes the shapes and the mathematics of a family.

To add a family with known building blocks, add a record. Families differ in the positions of norms, in
biases, windows, rotations, soft caps and scales. Every use of a model needs its shapes, which `families`
computes from config and record. The light engine also needs the mathematics, which `architecture` computes
from both. Names of tensors and defaults are those of transformers 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class Family(StrEnum):
    """Model family. The values are the `model_type` of `config.json`."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    OPT = "opt"
    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3_TEXT = "gemma3_text"
    GPT_NEOX = "gpt_neox"
    SMOLLM3 = "smollm3"
    GRANITE = "granite"
    OLMO2 = "olmo2"
    OLMO3 = "olmo3"
    EXAONE4 = "exaone4"
    PHI3 = "phi3"
    MINISTRAL3 = "ministral3"


class NormKind(StrEnum):
    """Kind of norm.

    - RMS: `w x / rms(x)`.
    - RMS_PLUS_ONE: `(1 + w) x / rms(x)`, as in Gemma.
    - LAYER: the usual layer norm, which also subtracts the mean and adds a bias.
    """

    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"
    LAYER = "layer"


class BlockKind(StrEnum):
    """Positions of the norms in a block. Here f is attention, and then the feed-forward part.

    - PRE: `x += f(norm(x))`.
    - SANDWICH: `x += norm(f(norm(x)))`.
    - POST: `x = norm(x + f(x))`.
    - PARALLEL: both parts read the block's input.

    A norm without a name in `BlockNames` is left out. If the norms after `f` have names, a PRE block also has
    these norms. For example, OLMo 2 has the kind PRE, and only norms after `f`.
    """

    PRE = "pre"
    SANDWICH = "sandwich"
    POST = "post"
    PARALLEL = "parallel"


class Windows(StrEnum):
    """Layers whose attention is limited to `sliding_window` tokens.

    - UPPER: the layers from `max_window_layers` on, if `use_sliding_window` is set.
    - PATTERN: all layers but every n-th one, where n is `Description.window_pattern`.
    """

    NONE = "none"
    ALL = "all"
    UPPER = "upper"
    PATTERN = "pattern"


class Rotation(StrEnum):
    """Encoding of positions.

    - LEARNED: a table has a vector for each position.
    - WHOLE: whole heads are rotated.
    - PART: the first part of a head is rotated. `rotary_pct` gives its share of the head.
    - SHARE: as PART, but `partial_rotary_factor` gives the share.
    - BY_LAYER: layers with a window have other frequencies than layers with full attention.
    - SOME: `no_rope_layers` selects the rotated layers.
    - WINDOWED: if there are layers with a window, only these are rotated.
    """

    LEARNED = "learned"
    WHOLE = "whole"
    PART = "part"
    SHARE = "share"
    BY_LAYER = "by_layer"
    SOME = "some"
    WINDOWED = "windowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """Names of tensors inside a block, without `.weight`. None means that the family has no such tensor.

    `fused` has queries, keys and values in one matrix: head by head, or as `Description.stacked` says.
    """

    query: str | None = "self_attn.q_proj"
    key: str | None = "self_attn.k_proj"
    value: str | None = "self_attn.v_proj"
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
class Description:
    """Description of one family. A pair is a config key with its default.

    Attributes:
        final_norm: the norm before the head. A config of OPT may turn it off.
        stacked: `fused` has all queries, then all keys, then all values. `up` begins with the gate's rows.
        head: the default width of a head. None means the hidden size divided by the number of heads.
        silent_kv_heads: whether the config may lack `num_key_value_heads`. There are then as many key-value
            heads as heads.
        always_biased: the linear layers that always have a bias.
        attention_bias: the flag for biases of attention, or None if there is no such flag.
        mlp_bias: the same for the feed-forward part.
        query_scalar: the default of `query_pre_attn_scalar`. If it is None, the width of a head takes its
            place.
        attention_softcap: the default of the soft cap of scores.
        final_softcap: the default of the soft cap of logits.
        head_norms_joined: one norm covers all heads of a query or key.
        theta: the default of `rope_theta`.
        near_theta: key and default of theta for layers with a window, if they have other frequencies.
        multiplied: the config has multipliers of embedding, scores, residuals and logits.
    """

    prefix: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    names: BlockNames = BlockNames()
    stacked: bool = False
    # The config key of the width between `up` and `down`.
    inner: str = "intermediate_size"
    head: int | None = None
    tied: bool = False
    silent_kv_heads: bool = False
    always_biased: tuple[str, ...] = ()
    attention_bias: tuple[str, bool] | None = ("attention_bias", False)
    mlp_bias: tuple[str, bool] | None = None
    block: BlockKind = BlockKind.PRE
    norm: NormKind = NormKind.RMS
    norm_epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6)
    activation: tuple[str, str] = ("hidden_act", "silu")
    windows: Windows = Windows.NONE
    window_pattern: int = 0
    rotation: Rotation = Rotation.WHOLE
    # Whether the embedding is multiplied by the square root of the hidden size.
    embedding_scaled: bool = False
    query_scalar: int | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    head_norms_joined: bool = False
    theta: float = 1e4
    near_theta: tuple[str | None, float] = (None, 1e4)
    multiplied: bool = False


_NORMED_HEADS = {"norm_query": "self_attn.q_norm", "norm_key": "self_attn.k_norm"}
_SANDWICH = {
    "norm_attention_out": "post_attention_layernorm",
    "norm_mlp": "pre_feedforward_layernorm",
    "norm_mlp_out": "post_feedforward_layernorm",
}

# One norm follows attention, and one follows the feed-forward part. No norm comes before them.
_NORMED_AFTER = BlockNames(
    norm_attention=None,
    norm_attention_out="post_attention_layernorm",
    norm_mlp=None,
    norm_mlp_out="post_feedforward_layernorm",
    **_NORMED_HEADS,
)
_OLMO2 = Description(
    silent_kv_heads=True,
    names=_NORMED_AFTER,
    norm_epsilon=("rms_norm_eps", 1e-5),
    head_norms_joined=True,
)

DESCRIPTIONS: Mapping[Family, Description] = {
    Family.LLAMA: Description(silent_kv_heads=True, mlp_bias=("mlp_bias", False)),
    # Mistral has no biases, and no key for them.
    Family.MISTRAL: Description(attention_bias=None, windows=Windows.ALL),
    Family.QWEN2: Description(
        # Qwen 2 always has these biases, and no config key for them. The output has no bias.
        attention_bias=None,
        always_biased=("query", "key", "value"),
        windows=Windows.UPPER,
    ),
    Family.QWEN3: Description(head=128, names=BlockNames(**_NORMED_HEADS), windows=Windows.UPPER),
    Family.GEMMA: Description(
        head=256,
        tied=True,
        norm=NormKind.RMS_PLUS_ONE,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        embedding_scaled=True,
    ),
    Family.GEMMA2: Description(
        head=256,
        tied=True,
        names=BlockNames(**_SANDWICH),
        block=BlockKind.SANDWICH,
        norm=NormKind.RMS_PLUS_ONE,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        windows=Windows.PATTERN,
        window_pattern=2,
        embedding_scaled=True,
        query_scalar=256,
        attention_softcap=50.0,
        final_softcap=30.0,
    ),
    Family.GEMMA3_TEXT: Description(
        head=256,
        tied=True,
        names=BlockNames(**_SANDWICH, **_NORMED_HEADS),
        block=BlockKind.SANDWICH,
        norm=NormKind.RMS_PLUS_ONE,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        windows=Windows.PATTERN,
        window_pattern=6,
        rotation=Rotation.BY_LAYER,
        theta=1e6,
        near_theta=("rope_local_base_freq", 1e4),
        embedding_scaled=True,
        query_scalar=256,
    ),
    Family.OPT: Description(
        prefix="model.decoder.layers",
        embedding="model.decoder.embed_tokens",
        final_norm="model.decoder.final_layer_norm",
        names=BlockNames(
            output="self_attn.out_proj",
            gate=None,
            up="fc1",
            down="fc2",
            norm_attention="self_attn_layer_norm",
            # In spite of its name, this is the norm before the feed-forward part of each layer.
            norm_mlp="final_layer_norm",
        ),
        inner="ffn_dim",
        tied=True,
        attention_bias=("enable_bias", True),
        mlp_bias=("enable_bias", True),
        norm=NormKind.LAYER,
        activation=("activation_function", "relu"),
        rotation=Rotation.LEARNED,
    ),
    Family.GPT_NEOX: Description(
        prefix="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        names=BlockNames(
            query=None,
            key=None,
            value=None,
            fused="attention.query_key_value",
            output="attention.dense",
            gate=None,
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
        always_biased=("up", "down"),
        attention_bias=("attention_bias", True),
        block=BlockKind.PARALLEL,
        norm=NormKind.LAYER,
        norm_epsilon=("layer_norm_eps", 1e-5),
        activation=("hidden_act", "gelu"),
        rotation=Rotation.PART,
    ),
    Family.SMOLLM3: Description(
        silent_kv_heads=True,
        tied=True,
        mlp_bias=("mlp_bias", False),
        rotation=Rotation.SOME,
        theta=2e6,
    ),
    Family.GRANITE: Description(silent_kv_heads=True, mlp_bias=("mlp_bias", False), multiplied=True),
    Family.OLMO2: _OLMO2,
    Family.OLMO3: replace(
        _OLMO2,
        windows=Windows.PATTERN,
        window_pattern=4,
        rotation=Rotation.BY_LAYER,
        theta=5e5,
        # OLMo 3 has no key of its own for the theta of layers with a window.
        near_theta=(None, 5e5),
    ),
    Family.EXAONE4: Description(
        names=_NORMED_AFTER,
        attention_bias=None,
        norm_epsilon=("rms_norm_eps", 1e-5),
        windows=Windows.PATTERN,
        window_pattern=4,
        rotation=Rotation.WINDOWED,
    ),
    Family.PHI3: Description(
        silent_kv_heads=True,
        names=BlockNames(
            query=None,
            key=None,
            value=None,
            fused="self_attn.qkv_proj",
            gate=None,
            # The gate's rows come first in this matrix (`stacked`), so there is no tensor `gate`.
            up="mlp.gate_up_proj",
        ),
        stacked=True,
        mlp_bias=("mlp_bias", False),
        norm_epsilon=("rms_norm_eps", 1e-5),
        windows=Windows.ALL,
        rotation=Rotation.SHARE,
    ),
    Family.MINISTRAL3: Description(
        head=128,
        attention_bias=None,
        norm_epsilon=("rms_norm_eps", 1e-5),
        windows=Windows.ALL,
        theta=1e6,
    ),
}

TEXT_MODELS: Mapping[str, Family] = {"gemma3": Family.GEMMA3_TEXT, "mistral3": Family.MISTRAL}
"""For each model with vision, the default family of its text model."""
