"""Read the files beside a `tokenizer.json`: special tokens, chat template, and tokens that end an answer.

    files = TokenizerFiles.read(lambda name: package.file(name) if name in names else None)

The files are untrusted. Entries of an unexpected form are ignored, and broken JSON is refused.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from permille.errors import PackageError

MAX_TEMPLATE_CHARACTERS = 64 << 10
# Some models name only the end of a document as `eos_token_id`, so text would continue after the answer.
# llama.cpp also ends an answer at these tokens.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>")

TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")
"""The files that name special tokens and say how a text begins, the older one first."""

# Rules that prepare a text for the vocabulary. Others, such as tables of characters, are refused: the number
# of a text's tokens reaches the service, and a tokenizer could be made to count what a user wrote.
NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "ByteLevel")
)
PRE_TOKENIZERS = frozenset(
    ("ByteLevel", "BertPreTokenizer", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit")
)

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
            template=_template(read_file(TEMPLATE_FILE), config),
            stop_ids=tuple(stops),
        )

    @property
    def variables(self) -> dict[str, str]:
        """Return the special tokens as variables of the chat template, with the names that transformers uses.

        Missing `bos` and `eos` tokens are empty texts, because many templates print them unconditionally.
        """
        named = {f"{name}_token": token for name, token in self.special.items()}
        return {"bos_token": "", "eos_token": "", **named}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """The rules by which a tokenizer changes and splits a text before it looks up tokens.

    Example:
        >>> TextRules.read(b'{"normalizer": {"type": "NFC"}, "pre_tokenizer": null}').describe()
        'normalizer NFC, pre-tokenizer none'
    """

    normalizers: tuple[Mapping[str, Any], ...]
    pre_tokenizers: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, tokenizer: bytes) -> "TextRules":
        """Read the rules of a `tokenizer.json`, and refuse those that are not listed.

        Raises:
            PackageError: `tokenizer`: the file is malformed, or has another rule.
        """
        found = read_object(tokenizer)
        rules = cls(
            normalizers=tuple(_steps(found.get("normalizer"), "normalizers")),
            pre_tokenizers=tuple(_steps(found.get("pre_tokenizer"), "pretokenizers")),
        )
        others = [step for step in rules.normalizers if not _is_plain_normalizer(step)]
        others += [step for step in rules.pre_tokenizers if not _is_plain_pre_tokenizer(step)]
        if others:
            raise PackageError(
                "tokenizer",
                f"The tokenizer changes text by a rule that is not allowed: {others[0]!r:.200}. Take a model "
                "with a common tokenizer.",
            )
        return rules

    def describe(self) -> str:
        """Return the names of the rules, for the user."""
        names = (
            " + ".join(str(step["type"]) for step in steps) or "none"
            for steps in (self.normalizers, self.pre_tokenizers)
        )
        return "normalizer {}, pre-tokenizer {}".format(*names)


def _steps(rule: object, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a rule, also of sequences in sequences."""
    if rule is None:
        return
    if not isinstance(rule, dict):
        raise PackageError("tokenizer", f"A rule of the tokenizer is not an object: {rule!r:.100}.")
    parts = rule.get(name) if rule.get("type") == "Sequence" else None
    if not isinstance(parts, list):
        yield rule
        return
    for part in parts:
        yield from _steps(part, name)


def _is_plain_normalizer(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Prepend":
        return _is_mark(step.get("prepend"))
    if kind == "Replace":  # of spaces and quotes by one mark, never of letters or digits
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        return isinstance(text, str) and not any(map(str.isalnum, text)) and _is_mark(step.get("content"))
    return kind in NORMALIZERS


def _is_plain_pre_tokenizer(step: Mapping[str, Any]) -> bool:
    if step.get("type") != "Split":
        return step.get("type") in PRE_TOKENIZERS
    # With `invert`, the pattern names the parts that stay. Without, a pattern could remove what it names.
    return step.get("behavior") != "Removed" or step.get("invert") is True


def _is_mark(text: object) -> bool:
    return isinstance(text, str) and len(text) <= 1 and not text.isalnum()


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
    # An empty template would leave out every message.
    if not isinstance(template, str) or not template.strip():
        return None
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise PackageError(
            "chat-template",
            f"The template has {len(template)} characters, more than {MAX_TEMPLATE_CHARACTERS}. Shorten it.",
        )
    return template
