"""Tests of reading ChatGPT's exported conversations: the branch last seen, and hostile files."""

import json
from pathlib import Path
from typing import Any

import pytest

from permille.errors import InputError
from permille_agent.text import exports
from permille_agent.text.documents import Conversation
from permille_agent.text.exports import exported_conversations, parse_conversation
from permille_agent.text.reading import read_documents


def _message(role: str, *parts: object, kind: str = "text", **more: object) -> dict[str, Any]:
    return {"author": {"role": role}, "content": {"content_type": kind, "parts": list(parts)}, **more}


def _tree(messages: list[dict[str, Any] | None], name: str = "c1") -> dict[str, Any]:
    """Return a conversation in which each message answers the one before. The last message is current."""
    mapping = {
        str(place): {"id": str(place), "message": message, "parent": str(place - 1) if place else None}
        for place, message in enumerate(messages)
    }
    return {"id": name, "title": "t", "mapping": mapping, "current_node": str(len(messages) - 1)}


def test_the_branch_that_was_seen_last_is_read_without_what_nobody_said() -> None:
    tree = _tree(
        [
            None,
            _message("system", ""),
            _message("user", "about me", kind="user_editable_context"),
            _message("user", "How do I sow peas?"),
            _message("assistant", "search", recipient="web"),
            _message("tool", "results"),
            _message("assistant", "hidden", metadata={"is_visually_hidden_from_conversation": True}),
            _message("assistant", "Early\ue200cite\ue202turn0\ue201, in rows.", {"asset": "an image"}),
            _message("assistant", "Keep them moist【4:0†peas.pdf】.", recipient=None),
            _message("user", {"asset": "photo"}, "And beans?", kind="multimodal_text"),
            _message("assistant", "Later."),
        ]
    )
    tree["mapping"]["other"] = {"message": _message("assistant", "Another answer"), "parent": "3"}

    group, content = parse_conversation(json.dumps(tree))

    assert group == "chatgpt c1"
    assert content == Conversation(
        (
            ("user", "How do I sow peas?"),
            ("assistant", "Early, in rows.\n\nKeep them moist."),
            ("user", "And beans?"),
            ("assistant", "Later."),
        )
    )


def test_an_export_is_read_beside_other_files_and_bad_conversations_are_counted(tmp_path: Path) -> None:
    good = _tree([_message("user", 'A "bracket" ]} and \\'), _message("assistant", "Yes [")])
    unanswered = _tree([_message("user", "Hello?")], "c2")
    (tmp_path / "conversations.json").write_text(json.dumps([good, unanswered, {"x": 1}, good]))
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "note.md").write_text("A note.")
    documents, report = read_documents([tmp_path])
    assert [type(document.content).__name__ for document in documents] == ["Conversation", "PlainText"]
    assert report.summary() == (
        "2 files: 3 read, 2 skipped: 1 x no assistant message, 1 x not a conversation of ChatGPT, Claude or "
        "Open WebUI (duplicates left out: 1); 1 file ignored: 1 x .json"
    )
    assert report.examples[0].endswith("conversations.json, conversation 2: no assistant message")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a ChatGPT export"),
        ('{"mapping": {}}', "not a ChatGPT export"),
        ("[", "not JSON"),
        ("[[1, 2]", "not JSON"),
        ('["' + '\\"' * 200_000, "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_hostile_files_are_refused_in_little_time(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        list(exported_conversations(text))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mapping": []}, "not a conversation of ChatGPT, Claude or Open WebUI"),
        ({"mapping": {"1": {"message": None, "parent": "1"}}}, "without a beginning"),
        ({"mapping": {"1": {"message": None, "parent": ["0"]}}}, "no assistant message"),
        ({"mapping": {"1": []}}, "no assistant message"),
        ({"mapping": {}, "current_node": 4}, "no assistant message"),
        ({"mapping": {"1": {"message": {"author": [], "content": 3}, "parent": None}}}, "no assistant"),
        ({"mapping": {"1": {"message": _message("assistant", "x\ud800")}}}, "no assistant"),
    ],
)
def test_hostile_conversations_are_refused(change: dict[str, Any], reason: str) -> None:
    tree = _tree([_message("user", "a"), _message("assistant", "b")])
    with pytest.raises(InputError, match=reason):
        parse_conversation(json.dumps(tree | change))


@pytest.mark.parametrize(
    "current", [{}, {"current_node": None}, {"current_node": "gone"}, {"current_node": 4}]
)
def test_without_a_current_node_the_newest_message_ends_the_branch(current: dict[str, Any]) -> None:
    tree = _tree([_message("user", "a"), _message("assistant", "old", create_time=5)])
    del tree["current_node"]
    tree["mapping"]["new"] = {"message": _message("assistant", "new", create_time=7.5), "parent": "0"}
    tree["mapping"]["none"] = {"message": _message("assistant", "undated"), "parent": "0"}
    _, content = parse_conversation(json.dumps(tree | current))
    assert content == Conversation((("user", "a"), ("assistant", "new")))


def test_the_time_of_a_message_may_be_any_number() -> None:
    tree = _tree([_message("user", "a"), _message("assistant", "old", create_time=5)])
    del tree["current_node"]
    tree["mapping"]["new"] = {"message": _message("assistant", "new", create_time=10**400), "parent": "0"}
    assert parse_conversation(json.dumps(tree))[1] == Conversation((("user", "a"), ("assistant", "new")))


def test_a_branch_begins_after_a_message_that_was_deleted() -> None:
    tree = _tree([_message("user", "gone"), _message("user", "a"), _message("assistant", "b")])
    del tree["mapping"]["0"]
    assert parse_conversation(json.dumps(tree))[1] == Conversation((("user", "a"), ("assistant", "b")))


def test_spoken_turns_are_read_and_their_sound_is_not() -> None:
    def spoken(role: str, words: str) -> dict[str, Any]:
        sound = {"content_type": "real_time_user_audio_video_asset_pointer", "audio_asset_pointer": {}}
        said = {"content_type": "audio_transcription", "text": words, "direction": "in"}
        return _message(role, said, sound, kind="multimodal_text")

    tree = _tree([spoken("user", "When do I sow?"), spoken("assistant", "In May.")])
    _, content = parse_conversation(json.dumps(tree))
    assert content == Conversation((("user", "When do I sow?"), ("assistant", "In May.")))


def test_a_conversation_of_claude_is_its_messages_without_tools() -> None:
    def sent(sender: str, text: object, *parts: dict[str, object]) -> dict[str, object]:
        return {
            "uuid": "m",
            "sender": sender,
            "text": text,
            "content": list(parts),
            "created_at": "2024-05-01",
        }

    messages = [
        sent("human", "When do I sow?", {"type": "text", "text": "When do I sow?"}),
        sent(
            "assistant",
            "This block is not supported on your current device yet.",
            {"type": "tool_use", "name": "search", "input": {}},
            {"type": "text", "text": "In May."},
        ),
        sent("human", "And beans?"),
        sent("assistant", "Later."),
        sent("system", "none"),
        sent("human", 4),
    ]
    group, content = parse_conversation(json.dumps({"uuid": "c", "name": "Peas", "chat_messages": messages}))
    assert group == "chatgpt c"
    assert content == Conversation(
        (
            ("user", "When do I sow?"),
            ("assistant", "In May."),
            ("user", "And beans?"),
            ("assistant", "Later."),
        )
    )


def test_a_conversation_has_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "MAX_CONVERSATION_CHARACTERS", 10)
    with pytest.raises(InputError, match="longer than 10"):
        parse_conversation(json.dumps(_tree([_message("user", "a")])))
    with pytest.raises(InputError, match="not JSON"):
        parse_conversation("{")


def _webui(*answers: tuple[str, object]) -> dict[str, Any]:
    """Return a chat as Open WebUI exports it: questions, and answers with their ratings."""
    messages: dict[str, dict[str, Any]] = {}
    last: str | None = None
    for number, (answer, rating) in enumerate(answers):
        asked, answered = f"q{number}", f"a{number}"
        messages[asked] = {"id": asked, "parentId": last, "role": "user", "content": f"Q{number}?"}
        messages[answered] = {"id": answered, "parentId": asked, "role": "assistant", "content": answer}
        messages[answered]["annotation"] = {"rating": rating, "reason": "other"} if rating else None
        last = answered
    history = {"messages": messages, "currentId": last}
    return {"id": "w1", "user_id": "u", "title": "t", "chat": {"title": "t", "history": history}}


def _rated(chat: dict[str, Any], message: str, rating: object) -> dict[str, Any]:
    """Return a rating as Open WebUI exports it, with a snapshot of its chat."""
    meta = {"chat_id": chat["id"], "message_id": message, "message_index": 2}
    data = {"rating": rating, "model_id": "m", "reason": "other", "comment": ""}
    return {"id": "f1", "type": "rating", "data": data, "meta": meta, "snapshot": {"chat": chat}}


def test_answers_of_open_webui_that_were_rated_down_are_left_out() -> None:
    thought = (
        '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> hm\n</details>\nIn March.'
    )
    chat = _webui((thought, None), ("Never.", -1), ("In rows.", 1), ("No.", "-1"), ("", None))
    group, content = parse_conversation(json.dumps(chat))
    assert group == "chatgpt w1"
    assert content == Conversation(
        (("user", "Q0?"), ("assistant", "In March."), ("user", "Q2?"), ("assistant", "In rows."))
    )


@pytest.mark.parametrize("begin", ['<details type="reasoning" done="false">\n> hm ', '<details type="'])
def test_a_thought_of_open_webui_without_an_end_is_left_out_in_little_time(begin: str) -> None:
    chat = _webui(("In March.\n" + begin * 20_000, None))
    assert parse_conversation(json.dumps(chat))[1] == Conversation(
        (("user", "Q0?"), ("assistant", "In March."))
    )


def test_a_rating_of_open_webui_gives_the_branch_up_to_its_answer() -> None:
    chat = _webui(("In March.", None), ("In rows.", 1), ("Later.", None))
    group, content = parse_conversation(json.dumps(_rated(chat, "a1", 1)))
    assert group == parse_conversation(json.dumps(chat))[0]
    assert content == Conversation(
        (("user", "Q0?"), ("assistant", "In March."), ("user", "Q1?"), ("assistant", "In rows."))
    )
    for rating in (-1, "-1"):
        with pytest.raises(InputError, match="an answer that was rated down"):
            parse_conversation(json.dumps(_rated(chat, "a1", rating)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chat": {"history": {"messages": []}}}, "no assistant message"),
        (
            {"chat": {"history": {"messages": {"a": {"parentId": "a"}}, "currentId": "a"}}},
            "without a beginning",
        ),
        ({"chat": {"messages": []}}, "not a conversation of ChatGPT, Claude or Open WebUI"),
        ({"snapshot": {"chat": None}, "data": {"rating": 1}}, "not a conversation"),
    ],
)
def test_damaged_chats_of_open_webui_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse_conversation(json.dumps(change))


def test_exports_of_open_webui_are_read_in_a_folder(tmp_path: Path) -> None:
    chat = _webui(("In March.", None), ("In rows.", 1))
    other = {**_webui(("Water them.", 1)), "id": "w2"}
    (tmp_path / "chat-export-1764000000000.json").write_text(json.dumps([chat]))
    ratings = [_rated(other, "a0", 1), _rated(chat, "a0", -1)]
    (tmp_path / "feedback-history-export-1764000000000.json").write_text(json.dumps(ratings))
    documents, report = read_documents([tmp_path])
    lengths = [len(one.content.messages) for one in documents if isinstance(one.content, Conversation)]
    assert lengths == [4, 2]
    assert report.examples[0].endswith("conversation 2: an answer that was rated down")
