"""Read the files beside a `tokenizer.json`: special tokens, chat template, and tokens that end an answer.

    files = TokenizerFiles.read(lambda name: package.file(name) if name in names else None)

The files are untrusted. Entries of an unexpected form are ignored, and broken JSON is refused.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from permille.errors import PackageError

MAX_TEMPLATE_CHARACTERS = 64 << 10
# Some models name only the end of a document as `eos_token_id`, so text would continue after the answer.
# llama.cpp also ends an answer at these tokens.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>")

SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")
"""The files that name special tokens and say how a text begins, the older one first."""

ReadFile = Callable[[str], bytes | None]
"""Returns the content of a file by its name, or None if it does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """Settings from the files beside a tokenizer.

    Attributes:
        special: the texts of special tokens by name: `bos`, `eos`, `unk`, `pad`. Missing ones are left out.
        add_bos: whether every text starts with the `bos` token.
        template: the chat template, or None.
        stop_ids: the tokens that end an answer, in the order of the files.
    """

    special: Mapping[str, str]
    add_bos: bool
    template: str | None
    stop_ids: tuple[int, ...]

    @classmethod
    def read(cls, read_file: ReadFile) -> "TokenizerFiles":
        """Read the files.

        Raises:
            PackageError: `tokenizer`: a file is not JSON. `chat-template`: the template is not UTF-8, or is
                longer than 64 Ki characters.
        """
        older, config = (read_object(read_file(name)) for name in SETTINGS_FILES)
        # `tokenizer_config.json` is the newer file, so its entries win.
        names = {**older, **config}
        tokens = {name: _text(names.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
        stops: dict[int, None] = {}
        for name in ("generation_config.json", "config.json"):
            value = read_object(read_file(name)).get("eos_token_id")
            for item in value if isinstance(value, list) else [value]:
                # `type`, not `isinstance`: True must not pass for an id.
                if type(item) is int:
                    stops[item] = None
        return cls(
            special={name: token for name, token in tokens.items() if token},
            add_bos=bool(config.get("add_bos_token")),
            template=_template(read_file("chat_template.jinja"), config),
            stop_ids=tuple(stops),
        )

    @property
    def variables(self) -> dict[str, str]:
        """Return the special tokens as variables of the chat template, with the names that transformers uses.

        Missing `bos` and `eos` tokens are empty texts, because many templates print them unconditionally.
        """
        named = {f"{name}_token": token for name, token in self.special.items()}
        return {"bos_token": "", "eos_token": "", **named}


def ends_of_turn(template: str | None) -> tuple[str, ...]:
    """Return the known ends of a turn that a chat template writes.

    Example:
        >>> ends_of_turn("{{ message.content }}<|im_end|>")
        ('<|im_end|>',)
    """
    return tuple(name for name in END_OF_TURN if template is not None and name in template)


def read_object(data: bytes | None) -> dict[str, Any]:
    """Parse the JSON object of a file. Return an empty one for a missing file or another JSON value.

    Raises:
        PackageError: `tokenizer`: the bytes are not JSON.
    """
    try:
        value = None if data is None else json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise PackageError(
            "tokenizer", f"A file of the tokenizer is not JSON: {exc!s:.200}. Save it again."
        ) from exc
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _template(file: bytes | None, config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if file is not None:
        try:
            template = file.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise PackageError("chat-template", "The chat template is not UTF-8. Save it in UTF-8.") from exc
    elif isinstance(template, list):
        # Some models have several named templates. Take the last one named "default", as transformers does.
        named = (entry for entry in reversed(template) if isinstance(entry, dict))
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        return None
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise PackageError(
            "chat-template",
            f"The template has {len(template)} characters, more than {MAX_TEMPLATE_CHARACTERS}. Shorten it.",
        )
    return template
