"""Checks of the files in a package that tell libraries what to do (FORMAT 3.3).

A `config.json` can name code to import, kernels to download and files to open. So its keys are on
an allow-list, and only plain settings pass. Both the writer and the reader of a package check this.
"""

import json
from collections.abc import Mapping
from typing import Any

from permille.digests import finite_number
from permille.errors import InputError, PackageError
from permille.models.config_keys import CONFIG_KEYS, check_plain
from permille.models.families import expected_tensors, family_of

MAX_CONFIG_BYTES = 8 << 20  # this much, since tokenizer_config.json holds chat templates and added tokens


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
    try:
        check_plain(config)
    except InputError as exc:
        raise PackageError("config-malformed", str(exc)) from exc
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
