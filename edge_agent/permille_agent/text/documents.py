"""Kinds of documents, and the rows of a `.jsonl` file that are documents."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from permille.errors import InputError

ROLES = ("system", "user", "assistant")
TOOLS = ("tool", "function")
"""Roles of the answers of tools."""
# The kinds of parts of a message that are text, and the name of the text in each.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_HALVES = re.compile("[\ud800-\udfff]")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")


class Learn(StrEnum):
    """Roles whose turns of a conversation count in the loss. System messages never count.

    The default is `ASSISTANT`, because in a chat the model only writes answers. `USER` learns the user's own
    voice, for example from conversations with another model.
    """

    USER = "user"
    ASSISTANT = "assistant"
    ALL = "all"

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose turns count."""
        return ("user", "assistant") if self is Learn.ALL else (self.value,)


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text of which every token counts in the loss."""

    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and the text that should follow it. Only the completion counts in the loss."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages as (role, content). Only turns of the roles that `Learn` names count in the loss."""

    messages: tuple[tuple[str, str], ...]


Content = PlainText | Completion | Conversation


@dataclass(frozen=True, slots=True)
class Document:
    """A document, the unit that is assigned to a split.

    Attributes:
        group: SHA-256 of the group's name. Documents of one group go to the same split.
        content: text, completion or conversation.
        continues: whether the text continues that of the document before it.
        source: the file. Documents are compared without it, because the same text may be moved.
    """

    group: str
    content: Content
    continues: bool = False
    source: Path | None = field(default=None, compare=False)


def characters(content: Content) -> str:
    """Return the text of a document as one string, without the chat template."""
    match content:
        case PlainText(text):
            return text
        case Completion(prompt, completion):
            return f"{prompt}\n\n{completion}"
        case Conversation(messages):
            return "\n\n".join(f"{role}: {text}" for role, text in messages)


def parse_row(row: object) -> tuple[str | None, Content]:
    """Return the group and the content of a parsed row of a `.jsonl` file.

    Example:
        >>> parse_row({"text": "Dear Anna,", "group": "letters"})
        ('letters', PlainText(text='Dear Anna,'))

    Raises:
        InputError: the row breaks a rule. The message contains no text of the user, because it becomes part
            of a report.
    """
    if not isinstance(row, dict):
        raise InputError("not a JSON object")
    group = row.get("group")
    if group is not None:
        group = _string(row, "group")
    # Programs write null for a column that a row lacks.
    kinds = [name for name in ("text", "messages", "completion") if row.get(name) is not None]
    if len(kinds) != 1:
        raise InputError("not exactly one of `text`, `messages`, `completion`")
    match kinds[0]:
        case "text":
            return group, PlainText(_string(row, "text"))
        case "completion":
            prompt = row.get("prompt")
            if not isinstance(prompt, str):
                raise InputError("`prompt` is not a string")
            return group, Completion(cleaned(prompt), _string(row, "completion"))
    return group, Conversation(_messages(row["messages"]))


def _string(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise InputError(f"`{name}` is not a string")
    if not (value := cleaned(value)).strip():
        raise InputError(f"`{name}` is empty")
    return value


def cleaned(text: str) -> str:
    r"""Return a text with `\n` at the ends of lines, without zeros and byte order marks.

    Halves of surrogate pairs become U+FFFD. Fonts of some PDF files and programs that cut an emoji give them.

    Example:
        >>> cleaned("one\r\ntwo")
        'one\ntwo'
    """
    if _HALVES.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "").replace("\ufeff", "")


def said(content: object) -> str:
    """Return the text of a message's content: null, a text, or a list of parts, as of OpenAI and others.

    Parts are lines. The thoughts of a model are left out, as in templates.

    Raises:
        InputError: a part is no text, such as an image.
    """
    parts = content if isinstance(content, list) else [content]
    texts = [_part(part) for part in parts if not (isinstance(part, dict) and part.get("type") in _THOUGHTS)]
    return "\n".join(texts)


def _part(part: object) -> str:
    if isinstance(part, dict) and (name := _TEXTS.get(str(part.get("type")))):
        part = part.get(name)
    if part is None:
        return ""
    if not isinstance(part, str):
        raise InputError("the content of a message is no text")
    return part


def encodable(text: str) -> str:
    """Return `text` if UTF-8 can encode it. Raises InputError otherwise."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InputError("a character that is not UTF-8, or half of a surrogate pair") from exc
    return text


def _messages(messages: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise InputError("`messages` is not a list with at least one message")
    turns = []
    for message in messages:
        if not isinstance(message, dict):
            raise InputError("a message is not an object")
        role = message.get("role")
        # The turns of tools are left out: a device has no tools.
        if role in TOOLS:
            continue
        text = cleaned(said(message.get("content")))
        if message.get("tool_calls") and not text.strip():
            continue
        role = "system" if role == "developer" else role
        if role not in ROLES:
            raise InputError(f"a message's role is not one of {', '.join(ROLES)}")
        turns.append((str(role), text))
    if not any(role == "assistant" and content.strip() for role, content in turns):
        raise InputError("no assistant message")
    return tuple(turns)
