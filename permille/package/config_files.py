"""Checks of the files in a package that tell libraries what to do (FORMAT 3.3).

A `config.json` can name code to import, kernels to download and files to open. So its keys are on
an allow-list, and only plain settings pass. Both the writer and the reader of a package check this.
"""

import json
from collections.abc import Mapping
from typing import Any

from permille.digests import finite_number
from permille.errors import InputError, PackageError
from permille.models.families import expected_tensors, family_of

MAX_CONFIG_BYTES = 8 << 20  # this much, since tokenizer_config.json holds chat templates and added tokens
# The configs of all families that we know stay within these two limits.
_MAX_DEPTH = 4
_MAX_TEXT = 200

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
CONFIG_KEYS = frozenset(_SHARED.split())


def clean_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the keys of the allow-list only.

    Raises:
        InputError: the family is unknown, or a key that the family needs is missing or invalid.
    """
    family_of(config)
    cleaned = {key: config[key] for key in sorted(config) if key in CONFIG_KEYS}
    # This raises if a needed key is missing. So the writer of a package finds the error, not its reader.
    expected_tensors(cleaned)
    return cleaned


def config_bytes(config: Mapping[str, Any]) -> bytes:
    r"""Return the `config.json` of a cleaned config. Keys are sorted, so equal configs give equal
    bytes.

    Example:
        >>> config_bytes({"vocab_size": 32, "model_type": "llama"})
        b'{\n  "model_type": "llama",\n  "vocab_size": 32\n}\n'
    """
    return (json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n").encode("utf-8")


def parse_config(data: bytes) -> dict[str, Any]:
    """Parse and check a `config.json`.

    Raises:
        PackageError: `config-malformed`, `config-key` or `config-model`.
    """
    config = _object(data)
    _check_settings(config, 0)
    unknown = sorted(config.keys() - CONFIG_KEYS)
    if unknown:
        raise PackageError("config-key", f"config.json has keys that no package may have: {unknown!r:.200}")
    try:
        expected_tensors(config)
    except InputError as exc:
        raise PackageError("config-model", str(exc)) from exc
    return config


def check_config_family(config: Mapping[str, Any], family: str) -> None:
    """Check that the family of the config is that of the manifest.

    Raises:
        PackageError: `config-model`.
    """
    found = family_of(config)
    if found != family:
        raise PackageError(
            "config-model", f"config.json is of family {found}, but the manifest names {family!r:.60}"
        )


def check_file(path: str, data: bytes) -> None:
    """Refuse a file whose content could make a library run code or download something.

    Raises:
        PackageError: `config-malformed`, `config-key` or `config-model`.
    """
    if path == "config.json":
        parse_config(data)
    elif path in ("generation_config.json", "tokenizer_config.json"):
        _refuse_code(_object(data), path)


def _check_settings(value: object, depth: int) -> None:
    """Check that texts are short and that collections are not deeply nested."""
    if depth > _MAX_DEPTH or (isinstance(value, str) and len(value) > _MAX_TEXT):
        raise PackageError(
            "config-malformed",
            f"A setting is nested deeper than {_MAX_DEPTH}, or longer than {_MAX_TEXT} letters.",
        )
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        _check_settings(item, depth + 1)


def _refuse_code(config: Mapping[str, Any], path: str) -> None:
    forbidden = sorted(
        # transformers imports code by these keys.
        {"auto_map", "custom_generate", "custom_pipelines", "trust_remote_code"} & config.keys()
    )
    if forbidden:
        raise PackageError("config-key", f"{path} names code, which no package may: {forbidden}. Remove it.")


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_CONFIG_BYTES:
        raise PackageError("config-malformed", f"expected at most {MAX_CONFIG_BYTES} bytes, got {len(data)}")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=finite_number,
            parse_float=finite_number,
        )
    except (ValueError, RecursionError) as exc:
        raise PackageError("config-malformed", f"expected a JSON object: {exc!s:.200}") from exc
    if not isinstance(value, dict):
        raise PackageError("config-malformed", f"expected a JSON object, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    # Parsers disagree about repeated keys, so a repeated key could hide a value from this check.
    if len(found) != len(pairs):
        raise ValueError("expected every key once")
    return found
