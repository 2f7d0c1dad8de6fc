"""Family, shape, tensors and linear layers of a model, from its `config.json` alone.

Tensor names are those of the state dict of transformers 5. `canonical_name` translates the names in older
checkpoints. A config is untrusted input, so every number is checked before it becomes a shape. This module
uses no torch and reads no files.

The shape of a linear layer's weight is (N, K) = (out_features, in_features).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from permille.errors import InputError
from permille.models.descriptions import DESCRIPTIONS, TEXT_MODELS, Description, Family, NormKind, Rotation
from permille.models.settings import Settings

Config = Mapping[str, Any]
TensorShape = tuple[int, ...]


class LayerPart(StrEnum):
    """The two parts of a block, which is a decoder layer. A scope may name one of the parts."""

    ATTENTION = "attention"
    MLP = "mlp"


SCOPE_PATTERN = r"all|attention|mlp|layers:[0-9]{1,5}(-[0-9]{0,5})?"
"""The forms of a scope, for schemas: everything, one part of every layer, or a range of layers (from 0)."""

# The order fixes the tensor ids of packages and logs, so it must never change.
_ROLES = {
    LayerPart.ATTENTION: ("query", "key", "value", "fused", "output"),
    LayerPart.MLP: ("gate", "up", "down"),
}
_NORMS = ("norm_attention", "norm_attention_out", "norm_mlp", "norm_mlp_out", "norm_query", "norm_key")

# Keys of configs on the hub that mark a mixture of experts, for any model_type.
_EXPERT_KEYS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
)
# Some mixtures have none of these keys. They are recognised by their `model_type`.
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
# Layers that no engine supports, by the `model_type` of families that need them.
_MISSING_LAYERS = {
    "falcon_h1": "state-space layers (Mamba)",
    "jamba": "state-space layers (Mamba)",
    "lfm2": "short convolutions",
    "mamba": "state-space layers (Mamba)",
    "mamba2": "state-space layers (Mamba)",
    "qwen3_5": "linear attention",
    "qwen3_next": "linear attention",
}

_OTHERS = "`permille models catalogue` lists models to choose from."
# The largest number of layers. Tensors are listed layer by layer, so a forged number could fill the memory.
MOST_LAYERS = 4096
# Counts above 2^53 are no exact numbers in JSON. The largest published models have some 2^41 weights.
MOST_PARAMETERS = 1 << 44


# Keys of a model with vision that also hold for its text model.
_SHARED_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "tie_word_embeddings",
)


# Values that published configs of Gemma 3 leave to the defaults of transformers.
_SILENT: Mapping[str, Config] = {
    "gemma3": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
    }
}


def text_config(config: Config) -> Config:
    """Return the config of the text model of a model with vision, else the config itself.

    Raises:
        InputError: a model with vision has no `text_config`.
    """
    model_type = str(config.get("model_type"))
    if model_type not in TEXT_MODELS:
        return config
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise InputError(f"config.json of a {model_type} model has no text_config. Download it again.")
    shared = {key: config[key] for key in _SHARED_KEYS if config.get(key) is not None}
    # Later entries win: defaults, then the text model's own keys, then those that the whole model shares.
    return {"model_type": TEXT_MODELS[model_type].value, **_SILENT.get(model_type, {}), **inner, **shared}


def family_of(config: Config) -> Family:
    """Return the family of a `config.json`.

    >>> family_of({"model_type": "llama"}).value
    'llama'

    Code that a config names (`auto_map`) is never run. A known family needs no such code.

    Raises:
        InputError: the family is unknown, or the model is a mixture of experts or already quantized. For an
            unknown family, the message says what is not supported, or lists the known families.
    """
    model_type = config.get("model_type")
    if config.get("quantization_config") is not None:
        raise InputError(
            f"The model is already quantized ({_method(config)}). Use its original in full precision."
        )
    if _is_mixture(config):
        raise InputError(
            f"The model is a mixture of experts (model_type {model_type!r}), which is not supported. "
            + _OTHERS
        )
    # An untrusted value may be a list, and a list cannot be looked up in a set.
    if not isinstance(model_type, str) or model_type not in set(Family):
        if (missing := _MISSING_LAYERS.get(str(model_type))) is not None:
            raise InputError(f"Models of type {model_type} are not supported: they need {missing}. {_OTHERS}")
        if "auto_map" in config:
            raise InputError(
                f"Models of type {model_type} bring code of their own (auto_map), which is not run. {_OTHERS}"
            )
        what = "Models without a model_type" if model_type is None else f"Models of type {model_type!r:.60}"
        raise InputError(f"{what} are not supported, only {', '.join(Family)}. {_OTHERS}")
    return Family(str(model_type))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The checked numbers of a config.

    Attributes:
        head: the width of an attention head.
        embedded: the width of the embedding. OPT projects it to the hidden size.
        positions: the rows of the table of learned positions, or 0 without one.
        normed: whether norms have weights. The norms of some OPT models have none.
        normed_last: whether there is a norm before the head.
        tied: whether the output head shares the embedding.
        biased: the roles of the linear layers with a bias.
        keys: the keys of the config that were read.
    """

    family: Family
    about: Description
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    heads: int
    kv_heads: int
    head: int
    embedded: int
    positions: int
    normed: bool
    normed_last: bool
    tied: bool
    biased: frozenset[str]
    keys: frozenset[str]

    def linear(self, part: LayerPart | None = None) -> dict[str, tuple[int, int]]:
        """Return the shapes of the linear layers in a block, or in one part of it, by name in the block."""
        query, key = self.heads * self.head, self.kv_heads * self.head
        shapes = {
            "query": (query, self.hidden),
            "key": (key, self.hidden),
            "value": (key, self.hidden),
            "fused": (query + 2 * key, self.hidden),
            "output": (self.hidden, query),
            "gate": (self.inner, self.hidden),
            "up": (self.inner * (2 if self.about.stacked else 1), self.hidden),
            "down": (self.hidden, self.inner),
        }
        found = {}
        for each, roles in _ROLES.items():
            for role in roles if part in (None, each) else ():
                if (name := getattr(self.about.names, role)) is not None:
                    found[f"{name}.weight"] = shapes[role]
        return found

    def block(self) -> dict[str, TensorShape]:
        """Return the shapes of all tensors of a block by name in the block, the linear layers first."""
        names = self.about.names
        tensors: dict[str, TensorShape] = dict(self.linear())
        for role in _NORMS if self.normed else ():
            if (name := getattr(names, role)) is not None:
                counts = {"norm_query": self.heads, "norm_key": self.kv_heads}
                joined = counts.get(role, 1) if self.about.head_norms_joined else 1
                width = joined * self.head if role in counts else self.hidden
                tensors |= self.norm(name, width)
        roles = [role for roles in _ROLES.values() for role in roles if role in self.biased]
        biased = [name for role in roles if (name := getattr(names, role)) is not None]
        return tensors | {f"{name}.bias": tensors[f"{name}.weight"][:1] for name in biased}

    def norm(self, name: str, width: int) -> dict[str, TensorShape]:
        """Return the shapes of the tensors of one norm, by name."""
        weight: dict[str, TensorShape] = {f"{name}.weight": (width,)}
        return weight | ({f"{name}.bias": (width,)} if self.about.norm is NormKind.LAYER else {})


def shape_of(config: Config) -> ModelShape:
    """Return the checked numbers of a config.

    Raises:
        InputError: as for `family_of`, or a number is missing, is no integer, or is out of range.
    """
    family = family_of(config)
    about, read = DESCRIPTIONS[family], Settings(config)
    learned = about.rotation is Rotation.LEARNED
    # `own_heads`: the config may set the number of key-value heads and the width of a head. OPT and GPT-NeoX
    # set neither: each head has one key-value head and an equal share of the hidden size.
    own_heads = not learned and (about.names.fused is None or about.stacked)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    if about.head is None and (not own_heads or config.get("head_dim") is None) and hidden % heads:
        raise InputError(f"hidden_size in config.json must be a multiple of {heads} heads, got {hidden}")
    silent = about.silent_kv_heads or "num_key_value_heads" in config
    kv_heads = read.size("num_key_value_heads", heads if silent else None) if own_heads else heads
    if heads % kv_heads:
        raise InputError(
            f"The {heads} heads in config.json must be a multiple of its {kv_heads} key-value heads"
        )
    last: list[bool] = []
    if learned:  # Read both keys in any case, so that neither counts as unknown.
        last = [read.flag("do_layer_norm_before", True), not read.flag("_remove_final_layer_norm", False)]
    return ModelShape(
        family=family,
        about=about,
        layers=read.size("num_hidden_layers", largest=MOST_LAYERS),
        hidden=hidden,
        inner=read.size(about.inner),
        vocabulary=read.size("vocab_size"),
        heads=heads,
        kv_heads=kv_heads,
        head=read.size("head_dim", about.head or hidden // heads) if own_heads else hidden // heads,
        embedded=read.size("word_embed_proj_dim", hidden) if learned else hidden,
        # OPT's table of positions has two rows before position 0.
        positions=read.size("max_position_embeddings") + 2 if learned else 0,
        normed=not learned or read.flag("layer_norm_elementwise_affine", True),
        normed_last=all(last),
        tied=is_tied(config),
        biased=_biased(about, read),
        keys=frozenset(read.keys),
    )


def _biased(about: Description, read: Settings) -> frozenset[str]:
    flags = {LayerPart.ATTENTION: about.attention_bias, LayerPart.MLP: about.mlp_bias}
    biased = [role for part, flag in flags.items() if flag and read.flag(*flag) for role in _ROLES[part]]
    return frozenset((*about.always_biased, *biased))


def expected_tensors(config: Config) -> dict[str, TensorShape]:
    """Return name and shape of every tensor of a checkpoint. A tied model has no `lm_head.weight`.

    The order is: embeddings, blocks by index (in each, the linear layers first), final norm, head.

    Raises:
        InputError: as for `shape_of`, or there are more than `MOST_PARAMETERS` weights.
    """
    shape = shape_of(config)
    about, table = shape.about, (shape.vocabulary, shape.embedded)
    tensors: dict[str, TensorShape] = {f"{about.embedding}.weight": table}
    if shape.positions:
        tensors["model.decoder.embed_positions.weight"] = (shape.positions, shape.hidden)
    # OPT-350m has an embedding that is narrower than its hidden states.
    if shape.embedded != shape.hidden:
        tensors["model.decoder.project_in.weight"] = (shape.hidden, shape.embedded)
        tensors["model.decoder.project_out.weight"] = (shape.embedded, shape.hidden)
    block = shape.block()
    for index in range(shape.layers):
        tensors |= {f"{about.prefix}.{index}.{name}": size for name, size in block.items()}
    if shape.normed and shape.normed_last:
        tensors |= shape.norm(about.final_norm, shape.hidden)
    if not shape.tied:
        tensors["lm_head.weight"] = table
    if (total := sum(map(math.prod, tensors.values()))) > MOST_PARAMETERS:
        raise InputError(f"config.json describes {total} weights, more than {MOST_PARAMETERS}.")
    return tensors


def scoped_tensors(config: Config, scope: str = "all") -> tuple[tuple[str, tuple[int, int]], ...]:
    """Return the linear layers that a mask may cover, in tensor_id order: by layer, then by role.

    Args:
        config: the config.
        scope: "all", "attention", "mlp", or a range of layers such as "layers:11-", "layers:4-7" or
            "layers:3". Layers are counted from 0, and a range includes both ends.

    Raises:
        InputError: as for `shape_of`, or the scope is malformed or is outside of the model's layers.
    """
    shape = shape_of(config)
    part = LayerPart(scope) if scope in set(LayerPart) else None
    layers = range(shape.layers) if part else _layers_in(scope, shape.layers)
    linear = shape.linear(part)
    return tuple(
        (f"{shape.about.prefix}.{index}.{name}", size) for index in layers for name, size in linear.items()
    )


def layer_of(name: str) -> int | None:
    """Return the index of a tensor's block, or None outside of the blocks.

    >>> layer_of("model.layers.11.mlp.up_proj.weight")
    11
    """
    _, found, rest = name.partition("layers.")
    return int(rest.split(".", 1)[0]) if found else None


def table_names(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of embedding and head. A checkpoint with a tied head does not have the head."""
    return f"{DESCRIPTIONS[family_of(config)].embedding}.weight", "lm_head.weight"


def is_tied(config: Config) -> bool:
    """Return whether the output head shares the embedding.

    If the config does not say, the family's default applies.
    """
    return Settings(config).flag("tie_word_embeddings", DESCRIPTIONS[family_of(config)].tied)


def canonical_name(config: Config, name: str) -> str | None:
    """Return the canonical name of a checkpoint's tensor, or None if the model does not use it.

    These tensors are not used: rotary and causal-mask buffers of old checkpoints, a stored copy of a tied
    head, and the vision parts of a model with vision.
    """
    family = family_of(config)
    if _VISION.match(name):
        return None
    name = _TEXT_MODEL.sub("model.", name).removeprefix("language_model.")
    if name.endswith((".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")):
        return None
    # Rename tensors of older releases.
    if family is Family.GPT_NEOX and name == "embed_out.weight":
        name = "lm_head.weight"
    if family is Family.OPT and name.startswith("decoder."):
        name = f"model.{name}"
    return None if name == "lm_head.weight" and is_tied(config) else name


_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_TEXT_MODEL = re.compile(r"^(model\.language_model|language_model\.model)\.")


def _layers_in(scope: str, layers: int) -> range:
    if scope == "all":
        return range(layers)
    form, _, bounds = scope.partition(":")
    first, dash, last = bounds.partition("-")
    if form != "layers" or not _is_index(first) or (last != "" and not _is_index(last)):
        raise InputError(
            f"{scope!r} is no scope. Write all, attention, mlp, layers:4-7, layers:4- or layers:4."
        )
    start = int(first)
    stop = (int(last) + 1 if last else layers) if dash else start + 1
    if not start < stop <= layers:
        raise InputError(f"The scope {scope!r} is outside of the model's layers 0 to {layers - 1}.")
    return range(start, stop)


def _is_index(text: str) -> bool:
    # `isdecimal` alone also accepts the digits of other scripts.
    return text.isascii() and text.isdecimal() and len(text) <= 5


def _is_mixture(config: Config) -> bool:
    model_type = str(config.get("model_type"))
    # 0 experts mean a dense model.
    counted = any(isinstance(config.get(key), int) and config[key] > 0 for key in _EXPERT_KEYS)
    return counted or "moe" in model_type.lower() or model_type in _EXPERT_TYPES


def _method(config: Config) -> str:
    quantization = config["quantization_config"]
    return (
        str(quantization.get("quant_method", "unnamed")) if isinstance(quantization, Mapping) else "unnamed"
    )
