"""Tests of exported chats: the formats of phones and languages, notices, placeholders, and other texts."""

import json

import pytest

from permille.errors import InputError
from permille_agent.text.chats import telegram_chats, whatsapp_chat

FORMS = [
    "[12/03/2024, 10:0{minute}:11] {who}: {said}",
    "\u200e[12/03/24, 10:0{minute}:11 PM] {who}: {said}",
    "[12.03.24, 10:0{minute}:11] ~\u202f{who}: {said}",
    "12/03/24, 22:0{minute} - {who}: {said}",
    "3/12/24, 10:0{minute}\u202fPM - {who}: {said}",
    "12/3/2024, 10:0{minute} p. m. - {who}: {said}",
    "12.03.24 à 10:0{minute} - {who}: {said}",
    "12-03-2024 10:0{minute} - {who}: {said}",
    "2024-03-12 10:0{minute} - {who}: {said}",
    "12. 3. 2024, 10:0{minute} - {who}: {said}",
    "2024. 3. 12. 오후 10:0{minute}, {who} : {said}",
    "2024년 3월 12일 오전 10:0{minute}, {who} : {said}",
    "2024-03-12 22h0{minute} - {who}: {said}",
    "[2024/3/12 下午10:0{minute}:11] {who}: {said}",
    "10:0{minute}, 12/03/2024 - {who}: {said}",
    "[10:0{minute} AM, 3/12/2024] {who}: {said}",
    "\u200f12\u200f/3\u200f/2024، 10:0{minute} ص - {who}: {said}",
]


def _exported(form: str, *turns: tuple[str, str]) -> str:
    return "\n".join(
        form.format(minute=place % 10, who=who, said=said) for place, (who, said) in enumerate(turns)
    )


@pytest.mark.parametrize("form", FORMS)
def test_messages_are_read_without_times_in_the_forms_of_all_phones(form: str) -> None:
    text = _exported(
        form, ("Marta", "did it rain?"), ("Jo", "a bit: 3 mm\n\nat 10:30 - or so"), ("Jo", "yes")
    )
    chat = whatsapp_chat(text)
    assert chat is not None
    assert chat.text() == "Marta: did it rain?\nJo: a bit: 3 mm\n\nat 10:30 - or so\nyes"
    assert chat.notices == 0


@pytest.mark.parametrize(
    "said",
    [
        "\u200eimage omitted",
        "image omitted",
        "\u200eBild weggelassen",
        "\u200eMessages and calls are end-to-end encrypted.",
        "<Media omitted>",
        "<Medien ausgeschlossen>",
        "<メディアは含まれていません>",
        "\u200e<attached: 00000012-PHOTO-2024-03-12.jpg>",
        "IMG-20240312-WA0001.jpg (file attached)",
        "\u200eIMG-20240312-WA0001.jpg (Datei angehängt)",
        "This message was deleted",
        "You deleted this message.",
        "Diese Nachricht wurde gelöscht",
        "Missed voice call",
        "null",
    ],
)
def test_placeholders_and_notices_are_left_out_and_counted(said: str) -> None:
    chat = whatsapp_chat(
        _exported(FORMS[0], ("Jo", "Look:"), ("Jo", said), ("Jo", "The beans."), ("Ann", "Oh"))
    )
    assert chat is not None
    assert chat.text() == "Jo: Look:\nThe beans.\nAnn: Oh"
    assert chat.notices == 1


def test_a_line_without_a_sender_is_a_notice_and_captions_and_corrected_messages_stay() -> None:
    chat = whatsapp_chat(
        "12/03/24, 22:01 - Messages and calls are end-to-end encrypted. Tap to learn more.\n"
        "12/03/24, 22:02 - Ann: IMG-20240312-WA0001.jpg (file attached)\nThe roses today\n"
        "12/03/24, 22:03 - Bo: a <b> and List<String> are fine\n"
        "13/03/24, 22:04 - Ann: good <This message was edited>\n"
        "13/03/24, 22:05 - Bo added Cy\n"
        "13/03/24, 22:06 - +49 170 1234567: hello"
    )
    assert chat is not None
    assert chat.text() == (
        "Ann: The roses today\nBo: a <b> and List<String> are fine\n\nAnn: good\n+49 170 1234567: hello"
    )
    assert chat.notices == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A note.\n12/03/24, 22:01 - Ann: hello",
        "12/03/2024, 10:00 went out\n12/03/2024, 11:00 came home: tired",
        "12.03.2024, 10:00 - Rain: a lot.\n\nI sowed peas.\n\nMuch text\nhere\nand there",
        "12/03/2024, 10:00 - rain\n13/03/2024, 10:00 - sun\n14/03/2024, 10:00 - late: hail",
        "10:00 - Ann: hello\n10:01 - Bo: hello",
    ],
)
def test_a_diary_is_no_chat(text: str) -> None:
    assert whatsapp_chat(text) is None


def _telegram(text: object, **more: object) -> dict[str, object]:
    return {"type": "message", "date": "2024-03-12T10:02:11", "from": "Ann", "text": text, **more}


def test_messages_of_telegram_are_read_without_services_media_and_what_was_forwarded() -> None:
    messages = [
        {
            "type": "service",
            "date": "2024-03-12T10:00:00",
            "actor": "Ann",
            "action": "phone_call",
            "text": "",
        },
        _telegram("Did it rain?"),
        _telegram(
            ["See ", {"type": "bold", "text": "this"}, {"type": "link", "text": " page"}], **{"from": "Bo"}
        ),
        _telegram("", photo="photos/1.jpg"),
        _telegram("By others", forwarded_from="News"),
        _telegram("A new day", date="2024-03-13T01:00:00", **{"from": None}),
        _telegram({"odd": 1}),
        "no message",
    ]
    alone = {"name": "Bo", "type": "personal_chat", "messages": messages}
    ((name, chat),) = telegram_chats(json.dumps(alone))
    assert name == "chat 1"
    assert chat.text() == "Ann: Did it rain?\nBo: See this page\n\nDeleted Account: A new day"
    assert chat.notices == 5
    several = list(telegram_chats(json.dumps({"chats": {"list": [alone, {"messages": []}, 3]}})))
    assert [found.text() for _, found in several] == [chat.text(), ""]


@pytest.mark.parametrize("text", ["{}", "3", '{"chats": []}', '{"messages": {}}'])
def test_other_json_is_no_export(text: str) -> None:
    with pytest.raises(InputError, match="not a ChatGPT or Telegram export"):
        list(telegram_chats(text))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not JSON"):
        list(telegram_chats(text))


@pytest.mark.parametrize("said", [" " * 200_000, "<" + " " * 200_000])  # hours, if each space began a search
def test_a_message_of_many_spaces_is_read(said: str) -> None:
    chat = whatsapp_chat(
        "[12/03/24, 10:00:11] Jo: Did it rain?\n" * 3 + f"[12/03/24, 10:00:12] Jo: a{said}b\n"
    )
    assert chat is not None
    assert chat.lines[-1] == f"a{said}b"
