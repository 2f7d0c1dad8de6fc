"""Reading of exported chats of WhatsApp (text) and Telegram (JSON) as what people wrote to each other.

A chat is one text: a line with the sender's name and the message, and an empty line between days. Times,
notices of the app, and placeholders of pictures are left out and counted. Nobody can say which of the
senders is the user, so a chat is no `Conversation`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from permille.errors import InputError

NOTICES: Final = "notice or placeholder of a chat"
# Marks of the direction of writing, which both apps put around names, times and their own words.
_DIRECTIONS: Final = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# "[12/03/24, 10:02:11 PM] " on iOS, "12.03.24, 10:02 - " on Android, with the order of the phone's language.
# Android in Korean ends the time with a comma.
_LINE: Final = re.compile(
    r"\[?(?P<date>\d{1,4}(?:([./-]) ?\d{1,2}\2|년 \d{1,2}월) ?\d{1,4}[.일]?)"
    r"(?:[^\d\n]{1,8}(?P<korean>오[전후] )|[^\d\n]{1,12})"
    r"\d{1,2}[:.h]\d{2}(?:[:.]\d{2})?(?:[\s\u202f][^\d\n\]-]{1,12}?)?"
    r"(?:\] ?|[\s\u202f][-–] |(?(korean), |(?!)))(?P<rest>.*)"
)
# "[10:02 AM, 3/12/2024] " is what WhatsApp Web copies, "10:02, 12/03/2024 - " is Android in Vietnamese.
_TIME_FIRST: Final = re.compile(
    r"\[?\d{1,2}[:.h]\d{2}(?:[:.]\d{2})?(?:[\s\u202f][^\d\n,\]-]{1,12})?,? "
    r"(?P<date>\d{1,4}([./-]) ?\d{1,2}\2 ?\d{1,4})(?:\] ?| [-–] )(?P<rest>.*)"
)
_SENDER: Final = re.compile(r"(?P<sender>[^:\n]{1,80}?): ?(?P<said>.*)", re.DOTALL)
# What the apps write in place of a message. iOS marks it by U+200E. Android writes a file in brackets.
_PLACEHOLDER: Final = re.compile(
    r"<(?:[^<>\n ]* [^<>\n]*|[^<>\n\x00-\x7f]+)>|null|[\w-]+\.\w{2,5} \([^()\n]+\)"
    r"|(?:image|video|video note|audio|gif|sticker|document|contact card|media) omitted"
    r"|(?:(?:this message was|you) deleted(?: this message)?|diese nachricht wurde gelöscht|du hast diese "
    r"nachricht gelöscht|ce message a été supprimé|vous avez supprimé ce message|se eliminó este mensaje|"
    r"eliminaste este mensaje|questo messaggio è stato eliminato|hai eliminato questo messaggio|"
    r"mensagem apagada|você apagou esta mensagem|dit bericht is verwijderd|je hebt dit bericht verwijderd"
    r"|missed (?:voice|video|group)[\w ]* call|(?:voice|video) call|waiting for this message[\w., ]*)\.?",
    re.IGNORECASE,
)
# The end of a message that was edited, or the name of the file of a caption.
_ADDED: Final = re.compile(r"(?<![ \u200e])[ \u200e]+<[^<>\n ]* [^<>\n]*>[ \t]*$", re.MULTILINE)
_HEAD_LINES: Final = 20


@dataclass(slots=True)
class Chat:
    """A chat that is read message by message.

    Attributes:
        lines: the messages, with empty lines between days.
        notices: the number of left out notices and placeholders.
    """

    lines: list[str] = field(default_factory=list)
    notices: int = 0
    _day: str = ""
    _sender: str = ""

    def add(self, day: str, sender: str, said: str) -> None:
        """Add a message. Without words it counts as a placeholder."""
        said = _DIRECTIONS.sub("", said).strip()
        sender = _DIRECTIONS.sub("", sender).strip(" ~\u202f")  # iOS marks an unknown number by `~`
        if not said:
            self.notices += 1
            return
        if self.lines and day != self._day:
            self.lines.append("")
            self._sender = ""
        self.lines.append(said if sender == self._sender else f"{sender}: {said}")
        self._day, self._sender = day, sender

    def text(self) -> str:
        """Return the whole chat."""
        return "\n".join(self.lines)


def whatsapp_chat(text: str) -> Chat | None:
    """Read a text as a chat of WhatsApp. Return None if it is another text.

    Example:
        >>> whatsapp_chat("[12/03/24, 10:00:11] Jo: Did it rain?").text()
        'Jo: Did it rain?'
    """
    head = [line for line in _lines(text[: 1 << 14]) if line.strip()][:_HEAD_LINES]
    if not head or _begin(head[0]) is None:
        return None
    # A diary has dates, too, but no sender after each.
    begun = [begin for line in head if (begin := _begin(line))]
    spoken = sum(_SENDER.match(begin["rest"]) is not None for begin in begun)
    if spoken * 2 <= len(begun) or spoken < min(3, len(head)):
        return None
    chat = Chat()
    for date, rest in _messages(text):
        said = _SENDER.match(rest)
        # A notice on Android has no sender. On iOS it has one, and the mark.
        if said is None or said["said"].startswith("\u200e"):
            chat.notices += 1
            continue
        words = _ADDED.sub("", said["said"])
        first, _, more = words.partition("\n")
        is_placeholder = _PLACEHOLDER.fullmatch(_DIRECTIONS.sub("", first).strip()) is not None
        chat.notices += is_placeholder and bool(more.strip())
        chat.add(date, said["sender"], more if is_placeholder else words)
    return chat


def _lines(text: str) -> list[str]:
    return [line.lstrip("\u200e\ufeff") for line in text.split("\n")]


def _begin(line: str) -> re.Match[str] | None:
    """Match the time before a message. In Arabic and Hebrew, marks stand between its numbers."""
    plain = _DIRECTIONS.sub("", line)
    return _LINE.match(line) or _LINE.match(plain) or _TIME_FIRST.match(plain)


def _messages(text: str) -> Iterator[tuple[str, str]]:
    """Yield the date of each message, and its sender and words, which may have many lines."""
    date, message = "", list[str]()
    for line in _lines(text):
        if (begin := _begin(line)) is None:
            message.append(line)
            continue
        if message:
            yield date, "\n".join(message)
        date, message = begin["date"], [begin["rest"]]
    if message:
        yield date, "\n".join(message)


def telegram_chats(text: str) -> Iterator[tuple[str, Chat]]:
    """Yield the chats of an export of Telegram, each with a name for reports.

    Raises:
        InputError: the text is no such export.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InputError("not JSON") from exc
    listed = [_object(value), *_list(_object(_object(value).get("chats")).get("list"))]
    chats = [chat for chat in map(_object, listed) if isinstance(chat.get("messages"), list)]
    if not chats:
        raise InputError("not a ChatGPT or Telegram export")
    for number, found in enumerate(chats, start=1):
        chat = Chat()
        for message in map(_object, found["messages"]):
            sender = message.get("from") or message.get("actor") or "Deleted Account"
            is_said = message.get("type") == "message" and "forwarded_from" not in message
            said = _telegram_words(message.get("text")) if is_said else ""
            chat.add(str(message.get("date", ""))[:10], str(sender), said)
        yield f"chat {number}", chat


def _telegram_words(text: object) -> str:
    """Return the words of a message: a string or a list of pieces. Links and emphasis are objects."""
    pieces = text if isinstance(text, list) else [text]
    words = (piece if isinstance(piece, str) else _object(piece).get("text") for piece in pieces)
    return "".join(word for word in words if isinstance(word, str))


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
