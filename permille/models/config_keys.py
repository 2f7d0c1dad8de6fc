"""The keys of a `config.json` that are kept, and the form of their values.

A `config.json` is untrusted. It can name code to import, kernels to download and files to open. If it
has megabytes, they would be copied into each row of the database. So only the keys of this list reach
transformers, a package or the database, and their values are plain and small.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from permille.errors import InputError

_SHARED = """
architectures bos_token_id dtype eos_token_id hidden_size initializer_range is_decoder is_encoder_decoder
max_position_embeddings model_type num_attention_heads num_hidden_layers pad_token_id sep_token_id
tie_word_embeddings torch_dtype transformers_version use_cache vocab_size attention_bias attention_dropout
attn_logit_softcapping bos_token_ids cache_implementation final_logit_softcapping head_dim hidden_act
hidden_activation intermediate_size layer_types max_window_layers mlp_bias num_key_value_heads
partial_rotary_factor pretraining_tp query_pre_attn_scalar rms_norm_eps rope_local_base_freq rope_parameters
rope_scaling rope_theta sliding_window sliding_window_pattern use_bidirectional_attention use_sliding_window
activation_dropout activation_function do_layer_norm_before dropout enable_bias ffn_dim init_std
layer_norm_elementwise_affine layerdrop prefix word_embed_proj_dim _remove_final_layer_norm classifier_dropout
hidden_dropout layer_norm_eps rotary_emb_base rotary_pct use_parallel_residual attention_multiplier
embedding_multiplier logits_scaling no_rope_layer_interval no_rope_layers residual_multiplier
original_max_position_embeddings
"""
CONFIG_KEYS: Final = frozenset(_SHARED.split())
MAX_KEPT_BYTES: Final = 64 << 10
"""Limit of the kept settings, as JSON. A list with one entry for each of 4096 layers takes most of it."""
# The configs of all families that we know stay within these two limits.
_MAX_DEPTH = 4
_MAX_TEXT = 200


def kept_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings whose keys are on the list.

        kept_settings({"model_type": "llama", "attn_implementation": "someone/kernels"})

    Raises:
        InputError: a setting is too long or too deeply nested, or all of them are too large.
    """
    kept = {key: value for key, value in config.items() if key in CONFIG_KEYS}
    check_plain(kept)
    if (size := len(json.dumps(kept))) > MAX_KEPT_BYTES:
        raise InputError(f"The settings in config.json take {size} bytes, more than {MAX_KEPT_BYTES}.")
    return kept


def check_plain(value: object, depth: int = 0) -> None:
    """Check that texts are short and that collections are not deeply nested.

    Raises:
        InputError: they are not.
    """
    if depth > _MAX_DEPTH or (isinstance(value, str) and len(value) > _MAX_TEXT):
        raise InputError(
            f"A setting in config.json is nested deeper than {_MAX_DEPTH}, or longer than {_MAX_TEXT} "
            "letters."
        )
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        check_plain(item, depth + 1)
