"""A typed reader of an untrusted `config.json`, with the defaults of transformers 5.

The reader records every key that is read. An unread key that is not known to be harmless is an error. So the
light engine either computes what transformers computes, or refuses the config.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from permille.errors import InputError
from permille.extras import install_line

# Bookkeeping, dropout (used in training only), and keys for the memory layout of old releases.
_HARMLESS = frozenset(
    {
        "activation_dropout",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "bos_token_ids",
        "cache_implementation",
        "classifier_dropout",
        "dropout",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "hidden_dropout",
        "init_std",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "layerdrop",
        "model_type",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "resid_pdrop",
        "sep_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
HINT = f"the torch engine may support this model: run {install_line('torch')}, then use --engine torch"


# The default limit of `Settings.size`. It is far above any published model, and a product of two such sizes
# fits into 64 bits.
_LARGEST_SIZE = 1 << 24


class Settings:
    """The config of a model, and the set of its keys that were read.

    Example:
        settings = Settings(config)
        hidden = settings.size("hidden_size")

    Attributes:
        keys: the keys that were read so far.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.keys: set[str] = set()

    def size(
        self, key: str, default: int | None = None, *, least: int = 1, largest: int = _LARGEST_SIZE
    ) -> int:
        """Return a whole number from `least` to `largest`."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= largest:
            raise InputError(
                f"{key} in config.json must be a whole number from {least} to {largest}, got {value!r:.200}"
            )
        return value

    def optional_size(self, key: str, default: int | None) -> int | None:
        """Return a whole number above 0. Return None if the key is null, and the default if it is absent."""
        if key in self._config and self._config[key] is None:
            self.keys.add(key)
            return None
        if key not in self._config and default is None:
            return None
        return self.size(key, default, largest=sys.maxsize)

    def number(self, key: str, default: float | None) -> float:
        """Return a positive number."""
        return positive(key, self._value(key, default))

    def optional_number(self, key: str, default: float | None) -> float | None:
        """Return a positive number. Return None if the key is null, and the default if it is absent."""
        value = self._config.get(key, default)
        self.keys.add(key)
        return None if value is None else positive(key, value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{key} in config.json must be true or false, got {value!r:.200}")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise unsupported(f"{key} to be a text", value)
        return value

    def table(self, key: str) -> dict[str, Any]:
        """Return a copy of a dictionary. It is empty if the key is absent or null."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise unsupported(f"{key} to be a dictionary", value)
        return dict(value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a list of texts, or None if the key is absent or null."""
        value = self._value(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise unsupported(f"{key} to be a list of texts", value)
        return tuple(value)

    def flags(self, key: str) -> list[bool] | None:
        """Return a list of flags, written as booleans or as 1 and 0, or None if the key is absent or null."""
        value = self._value(key, None)
        if value is None:
            return None
        # True and False equal 1 and 0, so both spellings pass.
        if not isinstance(value, list) or any(item not in (0, 1) for item in value):
            raise unsupported(f"{key} to be a list of 0 and 1", value)
        return [bool(item) for item in value]

    def require(self, key: str, *allowed: object) -> None:
        """Check that the key changes nothing: it is absent or null, or its value is one of `allowed`."""
        value = self._value(key, None)
        # Types are compared, too, because True == 1.
        if value is not None and not any(value == item and type(value) is type(item) for item in allowed):
            raise unsupported(f"{key} of {', '.join(map(repr, allowed)) or 'null'}", value)

    def passed_over(self, keys: Iterable[str]) -> None:
        """Mark keys as read, because other code uses them or because they change nothing here."""
        self.keys |= set(keys)

    def check_all_read(self) -> None:
        """Check that every key was read, is harmless or is null.

        Raises:
            InputError: a key was not read and is not known to be harmless.
        """
        left = sorted(
            key for key in self._config.keys() - self.keys - _HARMLESS if self._config[key] is not None
        )
        if left:
            raise unsupported("a config whose keys it knows", left)

    def _value(self, key: str, default: object) -> object:
        self.keys.add(key)
        value = self._config.get(key)
        # null counts as absent.
        return default if value is None else value


def positive(name: str, value: object) -> float:
    """Return `value` as a float. Raise InputError if it is not a finite number above 0."""
    # JSON may hold an integer that no float can represent. NaN fails both comparisons.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise unsupported(f"{name} to be a number above 0", value)
    return float(value)


def unsupported(expected: str, got: object) -> InputError:
    """Return an error for a setting that this engine does not support."""
    return InputError(f"The light engine needs {expected}, got {got!r:.200}; {HINT}")


def within_positions(config: Mapping[str, Any], wanted: int) -> int:
    """Return `wanted`, or the number of positions of the model if it has fewer.

    A config in which `max_position_embeddings` is missing or null sets no limit.

    Raises:
        InputError: the number is not whole, or below 1.

    Example:
        >>> within_positions({"max_position_embeddings": 512}, 2048)
        512
    """
    return min(wanted, Settings(config).optional_size("max_position_embeddings", None) or wanted)
