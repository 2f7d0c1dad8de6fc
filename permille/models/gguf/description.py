"""Description of a decoder for llama.cpp.

`ARCHITECTURES` lists the supported families. llama.cpp hard-codes some mathematics. A config that needs other
mathematics is refused here, because llama.cpp would load the file and compute something else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType, get_tensor_name_map
from numpy.typing import NDArray

from permille.errors import InputError
from permille.models.architecture import Activation, Architecture, architecture_of
from permille.models.descriptions import BlockKind, Family, NormKind
from permille.models.families import expected_tensors, shape_of
from permille.models.gguf.config import (
    ARCHITECTURES,
    GEMMAS,
    PATTERNS,
    SCALED_BY_WIDTH,
    UNROTATED,
    adds_one,
    row_order,
)

# Families whose biases llama.cpp reads.
_BIASED = (Family.LLAMA, Family.QWEN2, Family.GPT_NEOX, Family.GRANITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A decoder in the terms of llama.cpp.

    Attributes:
        positions: the length of the longest sequence. llama.cpp ignores the attention windows of some
            families. For these, the smallest window is the longest sequence that gives the same results.
        names: the name in a GGUF file of each tensor, by canonical name.
        rope_theta: the base of the rotary frequencies.
        rope_factor_E: a divisor for each rotary frequency (the tensor `ROPE_FACTORS`), float32, or None.
        rope_linear: the factor of linear scaling, by which all rotary frequencies are divided.
    """

    arch: MODEL_ARCH
    decoder: Architecture
    config: Mapping[str, Any]
    names: Mapping[str, str]
    positions: int
    rope_theta: float
    rope_factor_E: NDArray[np.float32] | None
    rope_linear: float

    @property
    def name(self) -> str:
        """Return the value of `general.architecture`."""
        return MODEL_ARCH_NAMES[self.arch]

    def write(self, writer: GGUFWriter) -> None:
        """Write the keys of the architecture."""
        shape, decoder = shape_of(self.config), self.decoder
        writer.add_context_length(self.positions)
        writer.add_embedding_length(shape.hidden)
        writer.add_block_count(shape.layers)
        writer.add_feed_forward_length(shape.inner)
        writer.add_head_count(shape.heads)
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head)
        writer.add_value_length(shape.head)
        writer.add_vocab_size(shape.vocabulary)
        if decoder.norm is NormKind.LAYER:
            writer.add_layer_norm_eps(decoder.norm_epsilon)
            writer.add_parallel_residual(decoder.block is BlockKind.PARALLEL)
        else:
            writer.add_layer_norm_rms_eps(decoder.norm_epsilon)
        rope = decoder.layers[0].rope
        writer.add_rope_dimension_count(rope.rotated if rope else shape.head)
        writer.add_rope_freq_base(self.rope_theta)
        if self.rope_linear != 1.0:
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(self.rope_linear)
        if decoder.attention_softcap is not None:
            writer.add_attn_logit_softcapping(decoder.attention_softcap)
        if decoder.final_softcap is not None:
            writer.add_final_logit_softcapping(decoder.final_softcap)
        if decoder.family is Family.GRANITE:
            writer.add_attention_scale(decoder.attention_scale)
            writer.add_embedding_scale(decoder.embedding_scale)
            writer.add_residual_scale(decoder.residual_scale)
            # llama.cpp divides logits by this number.
            writer.add_logit_scale(1 / decoder.logits_scale)
        if decoder.family in PATTERNS:
            writer.add_sliding_window(next((each.window for each in decoder.layers if each.window), 0))

    def row_order(self, name: str, rows: int) -> NDArray[np.int64] | None:
        """Return llama.cpp's order of a tensor's rows, or None if it is the order of the package."""
        return row_order(self.decoder.family, self.config, name, rows)

    def adds_one(self, name: str) -> bool:
        """Return whether the file must hold `1 + w` for a weight w.

        For such a norm, transformers multiplies by `1 + w`, and llama.cpp multiplies by what the file holds.
        """
        return adds_one(self.decoder.family, name)

    @property
    def head_copied(self) -> bool:
        """Return whether a tied head must be stored a second time."""
        return self.decoder.tied and self.arch in (MODEL_ARCH.GPTNEOX, MODEL_ARCH.OLMO2)


def describe(config: Mapping[str, Any]) -> Description:
    """Describe the decoder of a config for llama.cpp.

    Raises:
        InputError: llama.cpp does not know the family, or computes a setting in another way.
    """
    decoder = architecture_of(config)
    family = decoder.family
    if family not in ARCHITECTURES:
        raise _unknown(f"a family of {', '.join(ARCHITECTURES)}", family)
    _check(decoder, config)
    positions, windows = decoder.positions, [each.window for each in decoder.layers]
    if family in PATTERNS:
        # llama.cpp hard-codes which layers of these families have a window.
        pattern = [bool((layer + 1) % PATTERNS[family]) for layer in range(len(windows))]
        if [window is not None for window in windows] != pattern:
            raise _unknown(f"a window in all layers but every {PATTERNS[family]}th", windows)
    else:
        # llama.cpp would ignore the window. Up to the length of the window, the results are the same.
        positions = min([positions, *(window for window in windows if window is not None)])
    theta, linear, factor_E = _rope(decoder, config)
    return Description(
        arch=ARCHITECTURES[family],
        decoder=decoder,
        config=config,
        names=_names(family, config),
        positions=positions,
        rope_theta=theta,
        rope_linear=linear,
        rope_factor_E=factor_E,
    )


def _names(family: Family, config: Mapping[str, Any]) -> dict[str, str]:
    known, found = get_tensor_name_map(ARCHITECTURES[family], shape_of(config).layers), {}
    for name in expected_tensors(config):
        stored = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise InputError(f"llama.cpp knows no tensor {name}. Export the model for transformers.")
        found[name] = stored
    return found


def _check(decoder: Architecture, config: Mapping[str, Any]) -> None:
    family = decoder.family
    by_width = (family, len(decoder.layers)) in SCALED_BY_WIDTH
    width = shape_of(config).hidden // decoder.heads if by_width else decoder.head
    # llama.cpp derives the scale of the scores from this width. Only a Granite file can state another scale.
    if family is not Family.GRANITE and not np.isclose(decoder.attention_scale, width**-0.5):
        raise _unknown(f"scores scaled by {width} ** -0.5", decoder.attention_scale)
    expected = (
        {Activation.GELU_TANH}
        if family in GEMMAS
        else {Activation.GELU, Activation.GELU_TANH}
        if family is Family.GPT_NEOX
        else {Activation.SILU}
    )
    if decoder.activation not in expected:
        raise _unknown(f"activation {' or '.join(sorted(expected))}", decoder.activation)
    if family is Family.GEMMA2 and None in (decoder.attention_softcap, decoder.final_softcap):
        raise _unknown("soft caps of scores and logits in a Gemma 2", "none")
    if family in (Family.GEMMA, Family.GEMMA2) and not decoder.tied:
        raise _unknown("a tied head", "one of its own")
    if family is Family.OLMO2 and decoder.head * decoder.heads != shape_of(config).hidden:
        raise _unknown("heads that are as wide together as the hidden size", decoder.head)
    rotated = [each.rope is not None for each in decoder.layers]
    if family is Family.SMOLLM3 and rotated != [(at + 1) % UNROTATED != 0 for at in range(len(rotated))]:
        raise _unknown(f"a rotation in all layers but every {UNROTATED}th", rotated)
    biased = [name for name in expected_tensors(config) if name.endswith(".bias")]
    if biased and family not in _BIASED:
        raise _unknown("no biases", biased[0])
    if family is Family.GPT_NEOX and not any("query_key_value" in name for name in biased):
        raise _unknown("biases of attention", "none")


def _rope(
    decoder: Architecture, config: Mapping[str, Any]
) -> tuple[float, float, NDArray[np.float32] | None]:
    """Return theta, the factor of linear scaling, and divisors of the rotary frequencies.

    Theta is the base of the frequencies. The divisors are None if theta and the factor describe all
    frequencies.
    """
    ropes = {bool(each.window): each.rope for each in decoder.layers if each.rope is not None}
    rope = ropes.get(False) or ropes.get(True)
    if rope is None or rope.scaling != 1.0:
        raise _unknown("rope of types default, linear, dynamic or llama3", config.get("rope_scaling"))
    near = ropes.get(True) if decoder.family is Family.GEMMA3_TEXT else None
    if near is not None and not np.allclose(near.frequency_E, _plain(1e4, near.rotated), rtol=1e-5):
        raise _unknown("rope_theta 10000 in layers with a window", "another")
    # The first frequency is 1, unless linear scaling divides all of them.
    linear = float(f"{1 / rope.frequency_E[0]:.6g}")
    # The last frequency is `theta ** -((rotated - 2) / rotated)`, divided by the factor. Round to six digits,
    # because frequencies are float32: 9999.998 stands for 10000.
    theta = float(rope.frequency_E[-1] * linear) ** (-rope.rotated / max(rope.rotated - 2, 1))
    theta = float(f"{theta:.6g}")
    if np.allclose(rope.frequency_E * linear, _plain(theta, rope.rotated), rtol=1e-5):
        return theta, linear, None
    if ARCHITECTURES[decoder.family] is not MODEL_ARCH.LLAMA:
        raise _unknown("rope of types default, linear or dynamic", config.get("rope_scaling"))
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 1e4)
    return theta, 1.0, (_plain(theta, rope.rotated) / rope.frequency_E).astype(np.float32)


def _plain(theta: float, rotated: int) -> NDArray[np.float64]:
    return np.asarray(theta ** -(np.arange(0, rotated, 2) / rotated))


def _unknown(needed: str, got: object) -> InputError:
    return InputError(
        f"llama.cpp cannot compute this model: it needs {needed}, and the config has {got!r:.200}. "
        "Export it for transformers."
    )
