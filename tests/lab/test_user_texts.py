"""Tests of people from three collections: who is read, who is reported as bad, and who is selected."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from permille.errors import InputError
from permille_lab.people import user_texts
from permille_lab.people.user_texts import Collection, cohort, own_words, read_users

FILES = {
    Collection.SHAKESPEARE: "shakespeare/tinyshakespeare_by_speaker.jsonl",
    Collection.LAMP7: "lamp7_dev/lamp7_dev.jsonl",
    Collection.PERSONACHAT: "personachat_valid/dialogues.jsonl",
}


def written(data: Path, collection: Collection, lines: Sequence[object]) -> Path:
    path = data / "users" / FILES[collection]
    path.parent.mkdir(parents=True)
    path.write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    )
    return data


def test_speakers_have_a_document_a_speech(tmp_path: Path) -> None:
    row = {"user": "ROMEO", "n": 2, "text": ["But soft!", "Ay me."]}
    found = read_users(written(tmp_path, Collection.SHAKESPEARE, [row]), Collection.SHAKESPEARE)
    (romeo,) = found.users
    assert (romeo.name, [own_words(row) for row in romeo.documents]) == ("ROMEO", ["But soft!", "Ay me."])
    assert romeo.characters == 15
    assert not found.bad


def test_lines_that_are_no_person_are_reported_by_place(tmp_path: Path) -> None:
    good = {"user": "7", "input": "x", "output": "y", "profile": ["one tweet", "one tweet", " ", "two"]}
    lines = [
        *(json.dumps(good).encode() + b"\n", b'{"user": "8", "profile": ["cut of\n', b"\n"),
        *(
            b'{"user": "9", "profile": "no list"}\n',
            b'{"user": "10", "profile": [3]}\n',
            b'{"profile": []}\n',
        ),
    ]
    found = read_users(written(tmp_path, Collection.LAMP7, lines), Collection.LAMP7)
    (author,) = found.users
    # A repeated tweet counts once, and an empty one does not count.
    assert [own_words(row) for row in author.documents] == ["one tweet", "two"]
    assert [bad.name for bad in found.bad] == [f"lamp7_dev.jsonl:{n}" for n in (2, 4, 5, 6)]
    assert all("expected a person as JSON" in bad.reason for bad in found.bad)


def test_a_profile_that_is_one_string_is_no_list_of_letters(tmp_path: Path) -> None:
    lines = [b'{"user": "9", "profile": "no list"}\n', b'{"user": "1", "profile": ["a list"]}\n']
    found = read_users(written(tmp_path, Collection.LAMP7, lines), Collection.LAMP7)
    assert [user.name for user in found.users] == ["1"]
    assert len(found.bad) == 1


def test_separators_inside_a_tweet_end_no_line(tmp_path: Path) -> None:
    row = json.dumps({"user": "1", "profile": ["a\x85b c"]}, ensure_ascii=False).encode() + b"\n"
    found = read_users(written(tmp_path, Collection.LAMP7, [row]), Collection.LAMP7)
    assert own_words(found.users[0].documents[0]) == "a\x85b c"
    assert not found.bad


def test_dialogues_of_a_persona_are_one_person_with_prompts(tmp_path: Path) -> None:
    rows = [
        {"persona": ["i ski ."], "turns": [["hi", "hello there"], ["sport ?", "skiing"]]},
        {"persona": ["i cook ."], "turns": [["hi", "hey"]]},
        {"persona": ["i ski ."], "turns": [["and you ?", "fine"]]},
    ]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    found = read_users(written(tmp_path, Collection.PERSONACHAT, lines), Collection.PERSONACHAT)
    assert [len(user.documents) for user in found.users] == [3, 1]
    assert found.users[0].documents[0] == {"prompt": "hi\n", "completion": "hello there"}
    assert found.users[0].characters == len("hello there" + "skiing" + "fine")


def test_the_cohort_is_decided_by_names_and_length_alone(tmp_path: Path) -> None:
    rows = [{"user": f"S{n}", "text": ["word " * n]} for n in range(1, 30)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    users = read_users(written(tmp_path, Collection.SHAKESPEARE, lines), Collection.SHAKESPEARE).users
    chosen = cohort(users, least_characters=50)
    assert {user.name for user in chosen} == {f"S{n}" for n in range(10, 30)}
    assert chosen == cohort(users[::-1], least_characters=50)
    assert [user.characters for user in chosen] != sorted(user.characters for user in chosen)


def test_what_holds_nobody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="got no file"):
        read_users(tmp_path, Collection.LAMP7)
    data = written(tmp_path, Collection.LAMP7, [b"nonsense\n"])
    with pytest.raises(InputError, match="got none and 1 lines"):
        read_users(data, Collection.LAMP7)
    monkeypatch.setattr(user_texts, "MAX_LINE_BYTES", 4)
    with pytest.raises(InputError, match="at most 4 bytes"):
        read_users(data, Collection.LAMP7)
