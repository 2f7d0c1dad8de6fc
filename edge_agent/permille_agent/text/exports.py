"""Reading of exported conversations of ChatGPT, Claude and Open WebUI: a list of conversations.

Claude's conversation is a list of messages, the others are trees. Of a tree, only the branch that the user
saw last is read, from `current_node` up to the root. If the export names no such node, the newest message
without an answer ends the branch. Regenerated answers, tool calls, hidden messages and media are skipped.
Spoken turns give their words. Each conversation is a group of its own.

Open WebUI also exports the ratings of answers, each with its conversation. Of these, the branch that ends
with the rated answer is read. An answer that the user rated down is never trained on: it is left out with
its question, in both exports.

The file is cut into conversations before parsing. So only one parsed conversation is in memory at a time.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from permille.errors import InputError
from permille_agent.text.documents import Content, parse_row

MAX_CONVERSATION_CHARACTERS = 16 << 20
MAX_DEPTH = 64
# Matches whole strings, because brackets inside them do not count. A string without a closing quote extends
# to the end of the text.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
# ChatGPT marks a citation by text between two characters of the private use area. Older exports have
# "【4:0†notes.pdf】".
_CITATION = re.compile("\ue200[^\ue200\ue201]*\ue201|【[0-9:]+†[^】\n]{0,200}】")
# Open WebUI keeps what a model thought, or sent to a tool, in the text of its answer. A thought without an
# end, because the user stopped the answer, extends to the end of the text.
_DETAILS = re.compile(r'<details type=".*?(?:</details>|\Z)', re.DOTALL)
_TEXT_KINDS = ("text", "multimodal_text")


def exported_conversations(text: str) -> Iterator[str]:
    """Yield the JSON text of each conversation of an export.

    Example:
        >>> list(exported_conversations('[{"id": 1}, {"id": 2}]'))
        ['{"id": 1}', '{"id": 2}']

    Raises:
        InputError: the file is not a list, is nested too deeply, or ends too early. The conversations
            before the error were already yielded.
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
    """Return the group and the messages of the branch that the user saw last.

    Raises:
        InputError: the text is too long, is not a conversation, has no answer, or was rated down.
    """
    if len(text) > MAX_CONVERSATION_CHARACTERS:
        raise InputError(f"longer than {MAX_CONVERSATION_CHARACTERS} characters")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InputError("not JSON") from exc
    match value:
        case {"mapping": dict(tree)}:
            turns = _turns(tree, value.get("current_node"))
        case {"chat_messages": list(listed)}:
            turns = _listed_turns(listed)
        case {"chat": {"history": dict(history)}}:
            turns = _rated_turns(history, history.get("currentId"))
        case {"snapshot": {"chat": {"chat": {"history": dict(history)}} as shown}, "data": dict(rating)}:
            if _rating(rating) < 0:
                raise InputError("an answer that was rated down")
            turns = _rated_turns(history, _object(value.get("meta")).get("message_id"))
            value = shown  # ratings of the same conversation are one group
        case _:
            raise InputError("not a conversation of ChatGPT, Claude or Open WebUI")
    messages: list[dict[str, str]] = []
    for role, said in turns:
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{said}"
        elif messages or role == "user":  # templates want the user to begin, and turns to alternate
            messages.append({"role": role, "content": said})
    name = value.get("conversation_id") or value.get("id") or value.get("uuid")
    group = {"group": f"chatgpt {name}"} if isinstance(name, str) else {}
    # `parse_row` refuses a conversation without an answer, and gives the reason.
    return parse_row({"messages": messages or [{"role": "user", "content": ""}], **group})


def _listed_turns(listed: list[object]) -> Iterator[tuple[str, str]]:
    for message in map(_object, listed):
        parts = message.get("content")
        # `text` also has placeholders of tools, so the parts count if there are any.
        pieces = [part for part in map(_object, parts if isinstance(parts, list) else []) if part]
        words = [part.get("text") for part in pieces if part.get("type") == "text"] or [message.get("text")]
        said = "\n".join(word for word in words if isinstance(word, str)).strip()
        if said and message.get("sender") in ("human", "assistant"):
            yield "user" if message["sender"] == "human" else "assistant", said


def _turns(mapping: dict[str, Any], newest: object) -> Iterator[tuple[str, str]]:
    name = newest if isinstance(newest, str) and newest in mapping else _newest_leaf(mapping)
    for node in _branch(mapping, name, "parent"):
        message = node.get("message")
        if isinstance(message, dict) and (said := _text(message)):
            yield message["author"]["role"], said


def _rated_turns(history: dict[str, Any], last: object) -> Iterator[tuple[str, str]]:
    """Yield the turns of a branch of Open WebUI without answers that were rated down, and their questions."""
    question = ""
    for message in _branch(_object(history.get("messages")), last, "parentId"):
        words = message.get("content")
        said = _DETAILS.sub("", words).strip() if isinstance(words, str) else ""
        if message.get("role") == "user":
            question = f"{question}\n\n{said}".strip()
        elif message.get("role") == "assistant":
            if said and question and _rating(_object(message.get("annotation"))) >= 0:
                yield "user", question
                yield "assistant", said
            question = ""


def _rating(rated: dict[str, Any]) -> int:
    """Return -1 for a rating down, else 1. It is 1 or -1, or a text of this number."""
    return -1 if str(rated.get("rating")) == "-1" else 1


def _branch(nodes: dict[str, Any], last: object, parent: str) -> list[dict[str, Any]]:
    """Return the nodes from the root to `last`. Each node names its parent under the key `parent`.

    Raises:
        InputError: a node is its own ancestor.
    """
    branch: list[dict[str, Any]] = []
    seen: set[str] = set()
    # The parent of a message may have been deleted. Then the branch begins there.
    while isinstance(last, str) and isinstance(node := nodes.get(last), dict):
        if last in seen:
            raise InputError("a chain of messages without a beginning")
        seen.add(last)
        branch.append(node)
        last = node.get(parent)
    return branch[::-1]


def _newest_leaf(mapping: dict[str, Any]) -> str | None:
    parents = [_object(node).get("parent") for node in mapping.values()]
    answered = {name for name in parents if isinstance(name, str)}
    leaves = [name for name in mapping if name not in answered]
    # If times are equal or missing, the last leaf counts.
    return max(reversed(leaves), key=lambda name: _written_at(mapping[name]), default=None)


def _written_at(node: object) -> int | float:
    time = _object(_object(node).get("message")).get("create_time")
    return time if isinstance(time, int | float) else 0.0


def _text(message: dict[str, Any]) -> str:
    """Return the visible text of a message of the user or the model, or an empty string."""
    author, content, metadata = (_object(message.get(name)) for name in ("author", "content", "metadata"))
    is_visible = (
        author.get("role") in ("user", "assistant")
        and (message.get("recipient") or "all") == "all"  # other recipients are tools
        and not metadata.get("is_visually_hidden_from_conversation")
        and content.get("content_type") in _TEXT_KINDS
    )
    parts = content.get("parts")
    if not is_visible or not isinstance(parts, list):
        return ""
    # Of parts that are objects, only what was spoken has a text. Others are images and files.
    words = (part if isinstance(part, str) else _object(part).get("text") for part in parts)
    return _CITATION.sub("", "\n".join(word for word in words if isinstance(word, str))).strip()


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
