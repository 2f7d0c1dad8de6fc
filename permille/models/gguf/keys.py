"""Check of the keys in a GGUF file's metadata. Unknown ones are refused.

llama.cpp reads dozens of keys of an architecture, and some of them change what the model computes. So a key
must be read by this package, or be known to change nothing.
"""

from permille.models.descriptions import Family
from permille.models.gguf.file import OTHERWISE, GgufFile

_SHAPES = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "expert_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
}
_WINDOWS = {"attention.sliding_window", "final_logit_softcapping"}
_OWN = {
    Family.GPT_NEOX: {"attention.layer_norm_epsilon", "use_parallel_residual"},
    Family.GRANITE: {
        "attention.scale",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
        "rope.scaling.finetuned",
    },
    Family.GEMMA2: _WINDOWS | {"attn_logit_softcapping"},
    Family.GEMMA3_TEXT: _WINDOWS,
    Family.OLMO2: {"attention.sliding_window"},
}
_HARMLESS = {
    # The tensors tell this number, too.
    "vocab_size",
    # These belong to experts, to scalings that are refused, to old converters and to embeddings of texts.
    "expert_used_count",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "pooling_type",
    # llama.cpp has windows in some architectures alone.
    "attention.sliding_window",
}
_TOKENIZER = {
    *("model", "pre", "tokens", "token_type", "scores", "merges"),
    *(f"{name}_token_id" for name in ("bos", "eos", "eot", "unknown", "padding")),
    *("add_bos_token", "add_eos_token", "add_space_prefix"),
}
_TOKENIZER_HARMLESS = {
    # llama.cpp reads these for other kinds of tokenizers.
    *("token_type_count", "add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
    # Tokens with a meaning for programs. `seperator` is the name of the key.
    *(f"{name}_token_id" for name in ("eom", "seperator", "separator", "cls", "mask")),
    *(f"{name}_token_id" for name in ("prefix", "suffix", "middle")),
    *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
}


def check_keys(file: GgufFile, arch: str, family: Family) -> None:
    """Check that the file has no unknown key of its architecture or tokenizer.

    Raises:
        InputError: the file has such a key.
    """
    known = {f"{arch}.{key}" for key in _SHAPES | _OWN.get(family, set()) | _HARMLESS}
    known |= {f"tokenizer.ggml.{key}" for key in _TOKENIZER | _TOKENIZER_HARMLESS}
    for key, value in file.metadata.items():
        if key.startswith((f"{arch}.", "tokenizer.ggml.")) and key not in known:
            raise file.refused(f"sets {key[:80]} to {value!r:.40}, which is not supported. {OTHERWISE}")
