"""Reading what ChatGPT exports: `conversations.json`, a list of conversations, each a tree of messages.

Of each tree the branch counts that the user saw last, from `current_node` up to the root; other answers that
were asked for again are left out, like tool calls, hidden messages and everything that is not text. A
conversation is one group. The file is cut into conversations before anything is parsed, so memory is that of
the text and of one conversation, however long the file is.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from permille.errors import InputError
from permille_agent.text.documents import Content, parse_row

MAX_CONVERSATION_CHARACTERS = 16 << 20
MAX_DEPTH = 64
# Strings whole, an unfinished one to the end of the text: brackets in them do not count.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
# Where ChatGPT shows a source, its text has a mark between two private characters.
_CITATION = re.compile("\ue200[^\ue201]*\ue201")
_TEXT_KINDS = ("text", "multimodal_text")


def exported_conversations(text: str) -> Iterator[str]:
    """Cut an export into the JSON of its conversations.

    Raises:
        InputError: the file is no list, is nested too deeply, or ends too early; what came before counts.
    """
    if not text.lstrip().startswith("["):
        raise InputError("not a ChatGPT export")
    depth = start = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        bracket = match.group()[0]
        if bracket in "[{":
            depth += 1
            start = match.start() if depth == 2 else start
            if depth > MAX_DEPTH:
                raise InputError("nested too deeply")
        elif bracket in "]}":
            depth -= 1
            if depth == 1:
                yield text[start : match.end()]
            if depth == 0:
                return
    raise InputError("not JSON")


def parse_conversation(text: str) -> tuple[str | None, Content]:
    """Read the branch that the user saw last as chat messages; the conversation is the group.

    Raises:
        InputError: it is no conversation, or nobody answered in it.
    """
    if len(text) > MAX_CONVERSATION_CHARACTERS:
        raise InputError(f"longer than {MAX_CONVERSATION_CHARACTERS} characters")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InputError("not JSON") from exc
    if not isinstance(value, dict) or not isinstance(value.get("mapping"), dict):
        raise InputError("not a ChatGPT conversation")
    messages: list[dict[str, str]] = []
    for role, said in _turns(value["mapping"], value.get("current_node")):
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{said}"
        elif messages or role == "user":  # templates want the user to begin, and turns to alternate
            messages.append({"role": role, "content": said})
    name = value.get("conversation_id") or value.get("id")
    group = {"group": f"chatgpt {name}"} if isinstance(name, str) else {}
    return parse_row({"messages": messages or [{"role": "user", "content": ""}], **group})


def _turns(mapping: dict[str, Any], newest: object) -> Iterator[tuple[str, str]]:
    branch: list[object] = []
    seen: set[str] = set()
    name = newest
    while isinstance(name, str):
        node = mapping.get(name)
        if name in seen or not isinstance(node, dict):
            raise InputError("a chain of messages without a beginning")
        seen.add(name)
        branch.append(node.get("message"))
        name = node.get("parent")
    for message in reversed(branch):
        if isinstance(message, dict) and (said := _text(message)):
            yield message["author"]["role"], said


def _text(message: dict[str, Any]) -> str:
    """Return the visible text of a message of user or model, or an empty string."""
    author, content, metadata = (message.get(name) for name in ("author", "content", "metadata"))
    if not isinstance(author, dict) or author.get("role") not in ("user", "assistant"):
        return ""
    if message.get("recipient", "all") != "all":
        return ""
    if isinstance(metadata, dict) and metadata.get("is_visually_hidden_from_conversation"):
        return ""
    if not isinstance(content, dict) or content.get("content_type") not in _TEXT_KINDS:
        return ""
    parts = content.get("parts")
    texts = [part for part in parts if isinstance(part, str)] if isinstance(parts, list) else []
    return _CITATION.sub("", "\n".join(texts)).strip()
