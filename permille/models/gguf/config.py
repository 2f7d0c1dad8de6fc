"""The `config.json` of the model in a GGUF file, and its tensors by canonical name.

This is the inverse of `permille.models.gguf.description`, which writes such files. A test converts every
family there and back. Metadata is untrusted. Settings that a config cannot express are refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from numpy.typing import NDArray

from permille.errors import InputError
from permille.models.architecture import architecture_of
from permille.models.descriptions import Family
from permille.models.families import MOST_LAYERS, expected_tensors, shape_of
from permille.models.gguf.file import OTHERWISE, GgufFile
from permille.models.gguf.keys import check_keys
from permille.models.rope import rope_of
from permille.models.settings import HINT

Number = TypeVar("Number", bound=np.generic)
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of a Llama file with the divisors of the rotary frequencies."""

ARCHITECTURES = {
    Family.LLAMA: MODEL_ARCH.LLAMA,
    Family.MISTRAL: MODEL_ARCH.LLAMA,
    Family.QWEN2: MODEL_ARCH.QWEN2,
    Family.QWEN3: MODEL_ARCH.QWEN3,
    Family.GEMMA: MODEL_ARCH.GEMMA,
    Family.GEMMA2: MODEL_ARCH.GEMMA2,
    Family.GEMMA3_TEXT: MODEL_ARCH.GEMMA3,
    Family.GPT_NEOX: MODEL_ARCH.GPTNEOX,
    Family.SMOLLM3: MODEL_ARCH.SMOLLM3,
    Family.GRANITE: MODEL_ARCH.GRANITE,
    Family.OLMO2: MODEL_ARCH.OLMO2,
}
"""llama.cpp's architecture of each family. A Mistral file says `llama`, because both compute the same."""

PATTERNS = {Family.GEMMA2: 2, Family.GEMMA3_TEXT: 6}
"""In llama.cpp, every n-th layer of these families has no window. The values are n."""

# What llama.cpp takes if a file does not say.
_WINDOWS = {Family.GEMMA2: 4096}
_SOFTCAPS = {
    (Family.GEMMA2, "attn_logit_softcapping"): 50.0,
    (Family.GEMMA2, "final_logit_softcapping"): 30.0,
}

UNROTATED = 4
"""In llama.cpp, every n-th layer of a SmolLM3 has no rotation. The value is n."""

# The architectures for which llama.cpp rotates adjacent numbers of a head as a pair (`row_order`).
_NEIGHBOURS = (MODEL_ARCH.LLAMA, MODEL_ARCH.SMOLLM3, MODEL_ARCH.GRANITE)
# Llama and Mistral share `llama`. In reverse order, Llama comes after Mistral and replaces it.
_FAMILIES = {MODEL_ARCH_NAMES[arch]: family for family, arch in reversed(ARCHITECTURES.items())}
GEMMAS = (Family.GEMMA, Family.GEMMA2, Family.GEMMA3_TEXT)
SCALED_BY_WIDTH = {(Family.GEMMA2, 46), (Family.GEMMA3_TEXT, 62)}
"""The 27B models, by family and number of layers. llama.cpp recognises them by the same two properties.

They scale attention scores by `(hidden size / heads) ** -0.5`. The other models scale them by
`(head width) ** -0.5`.
"""
# The values of `factor` in the scaling of Llama 3.1 and of Llama 3.2.
_LLAMA3_FACTORS = (8.0, 32.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """The model of a GGUF file.

    Attributes:
        names: the names of tensors in the file, by canonical name.
    """

    file: GgufFile
    family: Family
    config: Mapping[str, Any]
    names: Mapping[str, str]

    def float32(self, name: str) -> NDArray[np.float32]:
        """Return a tensor by its canonical name, with rows and norms as in transformers."""
        found = self._restored(name, self.file.float32(self.names[name]))
        with np.errstate(invalid="ignore"):  # NaN is not checked here
            return found - np.float32(1) if adds_one(self.family, name) else found

    def type(self, name: str) -> GGMLQuantizationType:
        """Return the GGUF type of the tensor with this canonical name."""
        return self.file.tensors[self.names[name]].type

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes by its canonical name, with rows in the order of transformers.

        Each block lies within a row, so reordering rows moves whole blocks.
        """
        return self._restored(name, self.file.raw(self.names[name]))

    def _restored(self, name: str, found: NDArray[Number]) -> NDArray[Number]:
        order_N = row_order(self.family, self.config, name, len(found))
        if order_N is None:
            return found
        # The file was written as `rows[order_N]`, so this assignment restores the rows.
        restored = np.empty_like(found)
        restored[order_N] = found
        return restored


def read_model(file: GgufFile) -> GgufModel:
    """Find the config and the tensors of a file.

    Raises:
        InputError: the architecture or a setting is not supported, or tensors have other names or shapes than
            the config needs.
    """
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise file.refused("is a part of a split model. Join the parts first (llama-gguf-split --merge)")
    arch = file.text("general.architecture")
    family = _FAMILIES.get(arch)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise file.refused(f"holds a model of architecture {arch!r:.60}; supported are {known}. {OTHERWISE}")
    if int(_number(file, f"{arch}.expert_count", 0)):
        raise file.refused("holds a mixture of experts, which is not supported")
    check_keys(file, arch, family)
    config = _config(file, arch, family)
    try:
        architecture_of(config)  # refuse here what an engine would refuse after a long build
    except InputError as exc:
        raise file.refused(f"has unsupported settings: {str(exc).removesuffix(f'; {HINT}')}") from exc
    names = get_tensor_name_map(ARCHITECTURES[family], shape_of(config).layers)
    found: dict[str, str] = {}
    for name, shape in expected_tensors(config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None or stored not in file.tensors:
            raise file.refused(f"lacks the tensor {stored or name!r}")
        if file.tensors[stored].shape != shape:
            got = file.tensors[stored].shape
            raise file.refused(f"has {stored!r} of shape {list(got)}, not {list(shape)}")
        found[name] = stored
    others = file.tensors.keys() - set(found.values()) - {ROPE_FACTORS, "output.weight"}
    if others:
        raise file.refused(f"has {len(others)} tensors that its architecture lacks: {sorted(others)[:3]}")
    return GgufModel(file=file, family=family, config=config, names=found)


def row_order(family: Family, config: Mapping[str, Any], name: str, rows: int) -> NDArray[np.int64] | None:
    """Return the row order of llama.cpp for a tensor, or None if it is that of transformers.

    For some architectures, llama.cpp rotates adjacent numbers of a head as a pair. transformers pairs the
    first half of a head with the second. For GPT-NeoX, llama.cpp stores all queries, then all keys, then all
    values. transformers stores queries, keys and values of the first head, then those of the next head.
    """
    shape = shape_of(config)
    order = np.arange(rows)
    turned = any(part in name for part in (".q_proj.", ".k_proj."))
    if turned and ARCHITECTURES.get(family) in _NEIGHBOURS:
        return order.reshape(-1, 2, shape.head // 2).swapaxes(1, 2).reshape(-1)
    if family is Family.GPT_NEOX and ".query_key_value." in name:
        return order.reshape(shape.heads, 3, shape.head).swapaxes(0, 1).reshape(-1)
    return None


def adds_one(family: Family, name: str) -> bool:
    """Return whether the tensor is the weight of a norm that transformers applies as `1 + w`.

    llama.cpp applies every weight as it is stored, so a GGUF file holds `1 + w`.
    """
    return family in GEMMAS and name.endswith("norm.weight")


def _config(file: GgufFile, arch: str, family: Family) -> dict[str, Any]:
    def whole(key: str, default: int | None = None) -> int:
        found = _number(file, f"{arch}.{key}", default)
        if found != int(found) or found < 1:
            raise file.refused(f"names {arch}.{key} as {found!r}, which is no whole number from 1")
        return int(found)

    # The size of the vocabulary is read from this tensor.
    if "token_embd.weight" not in file.tensors:
        raise file.refused("lacks the tensor 'token_embd.weight'")
    layers, hidden = whole("block_count"), whole("embedding_length")
    heads = whole("attention.head_count")
    if layers > MOST_LAYERS:  # checked before a list of layers is made
        raise file.refused(f"names {layers} layers; 1 to {MOST_LAYERS} are read")
    head = whole("attention.key_length", hidden // heads)
    if whole("attention.value_length", head) != head:
        raise file.refused("has values of another width than keys, which is not supported")
    positions = whole("context_length")
    config: dict[str, Any] = {
        "model_type": family.value,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, arch, family, head, positions),
    }
    for name in ("bos", "eos"):
        token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        # llama.cpp ignores an id outside of the vocabulary, such as -1.
        known = isinstance(token, int) and 0 <= token < config["vocab_size"]
        config |= {f"{name}_token_id": token} if known else {}
    if family is Family.GPT_NEOX:
        return config | {
            "layer_norm_eps": _positive(file, f"{arch}.attention.layer_norm_epsilon", 1e-5),
            "use_parallel_residual": bool(file.metadata.get(f"{arch}.use_parallel_residual", True)),
            "rotary_pct": whole("rope.dimension_count", head) / head,
            # Files of this architecture do not state the activation.
            "hidden_act": "gelu",
        }
    if whole("rope.dimension_count", head) != head:
        raise file.refused("rotates a part of each head, which is not supported for this architecture")
    shared = whole("attention.head_count_kv", heads)
    # `shape_of` would refuse this, too, but would name a config.json that the user does not have.
    if heads % shared:
        raise file.refused(
            f"has {heads} attention heads, which are no multiple of its {shared} key-value heads"
        )
    config |= {
        "num_key_value_heads": shared,
        "head_dim": head,
        "rms_norm_eps": _positive(file, f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_act": "gelu_pytorch_tanh" if family in GEMMAS else "silu",
    }
    if family in (Family.LLAMA, Family.GRANITE):
        # The metadata does not say whether there are biases, but the tensors do.
        config |= {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
        config |= {"mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    if family is Family.SMOLLM3:
        config |= {"no_rope_layers": [int((layer + 1) % UNROTATED != 0) for layer in range(layers)]}
        # Without this key, transformers takes the padding id of the published model. This id may lie outside
        # the vocabulary of this file.
        config |= {"pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id")}
    if family is Family.GRANITE:
        if not file.metadata.get(f"{arch}.rope.scaling.finetuned", True):
            raise file.refused("holds a Granite without rotations, which is not supported")
        config |= {
            "attention_multiplier": _positive(file, f"{arch}.attention.scale", head**-0.5),
            "embedding_multiplier": _positive(file, f"{arch}.embedding_scale", 1.0),
            "residual_multiplier": _positive(file, f"{arch}.residual_scale", 1.0),
            "logits_scaling": _positive(file, f"{arch}.logit_scale"),
        }
    if family is Family.OLMO2 and file.metadata.get(f"{arch}.attention.sliding_window"):
        raise file.refused(f"holds an OLMo 3, which is not supported. {OTHERWISE}")
    if family in GEMMAS:
        config["hidden_activation"] = config["hidden_act"]
    if family in PATTERNS:
        width = hidden // heads if (family, layers) in SCALED_BY_WIDTH else head
        every = PATTERNS[family]
        kinds = [
            "full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)
        ]
        config |= {
            "query_pre_attn_scalar": width,
            # Without this key, llama.cpp gives no layer of a Gemma 3 a window.
            "sliding_window": whole("attention.sliding_window", _WINDOWS.get(family)),
            "layer_types": kinds,
        }
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            key, default = f"{arch}.{name}", _SOFTCAPS.get((family, name), 0.0)
            # 0 means no cap, but llama.cpp divides by the caps of a Gemma 2.
            capped = default or _number(file, key, default)
            config[name] = _positive(file, key, default) if capped else None
    return config


def _rope(file: GgufFile, arch: str, family: Family, head: int, positions: int) -> dict[str, Any]:
    theta = _positive(file, f"{arch}.rope.freq_base", 10_000.0)
    # A file need not name the type, and old files name the factor by another key.
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "linear")
    keys = (f"{arch}.rope.scaling.factor", f"{arch}.rope.scale_linear")
    key = next((key for key in keys if key in file.metadata), keys[0])
    # llama.cpp takes 0 for no scaling.
    scaled = kind == "linear" and _number(file, key, 0) != 0
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaled and (factor := _positive(file, key)) != 1:
        found |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        raise file.refused(f"scales its positions by {kind!r:.40}, which is not supported. {OTHERWISE}")
    if ROPE_FACTORS in file.tensors:
        if found["rope_type"] == "linear":
            raise file.refused(f"scales its positions in two ways, which is not supported. {OTHERWISE}")
        found = _llama3(file, theta, head, positions)
    if family is Family.GEMMA3_TEXT:
        # This theta is fixed in the code of llama.cpp, so files do not state it.
        near = {"rope_type": "default", "rope_theta": 10_000.0}
        return {"full_attention": found, "sliding_attention": near}
    return found


def _llama3(file: GgufFile, theta: float, head: int, positions: int) -> dict[str, Any]:
    """Find the `llama3` scaling that gives the file's frequency divisors. The file does not name it."""
    place = file.tensors[ROPE_FACTORS]
    if place.shape != (len(range(0, head, 2)),):  # checked before its numbers are read
        raise file.refused(f"has {ROPE_FACTORS!r} of shape {list(place.shape)}, for heads of {head}")
    divisor_E = file.float32(ROPE_FACTORS)
    plain_E = theta ** -(np.arange(0, head, 2) / head)
    for factor in _LLAMA3_FACTORS:
        scaling = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        # A file has the divisors in float32, so they are compared with a tolerance.
        wanted_E = plain_E / rope_of(scaling, head=head, positions=positions).frequency_E
        if wanted_E.shape == divisor_E.shape and np.allclose(divisor_E, wanted_E, rtol=1e-4):
            return scaling
    raise file.refused(
        "scales its positions by divisors that are not those of Llama 3, which is not supported"
    )


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    if isinstance(value, list):
        raise file.refused(f"names {key} layer by layer: layers of different shapes are not supported")
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise file.refused(f"has no number {key!r}")
    return value


def _positive(file: GgufFile, key: str, default: float | None = None) -> float:
    """Return a positive float32, rounded to seven digits: 1e-05 for 9.999999747378752e-06."""
    number = _number(file, key, default)
    if number <= 0:
        raise file.refused(f"names {key} as {number!r}, which must be above 0")
    return float(f"{number:.7g}")
