"""Tests of reading the user's text: formats, bad rows, duplicates and sections."""

import errno
import json
import os
from pathlib import Path

import pytest

from permille.errors import InputError
from permille_agent.state.home import as_json
from permille_agent.text import reading as data
from permille_agent.text import sources
from permille_agent.text.documents import Completion, Conversation, PlainText, characters
from permille_agent.text.reading import BLOCK_CHARACTERS, normalised, read_documents, sections
from tests.packages import sentences


def _jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_reads_the_three_kinds_of_rows(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"text": "one text"}, {"prompt": "Q: ", "completion": "A"}, {"messages": chat}]
    documents, report = read_documents([_jsonl(tmp_path / "a.jsonl", rows)])
    assert [document.content for document in documents] == [
        PlainText("one text"),
        Completion("Q: ", "A"),
        Conversation((("user", "Hi"), ("assistant", "Hello"))),
    ]
    assert as_json(report) == {
        "examples": report.examples,
        "files": 1,
        "ignored": {},
        "charsets": {},
        "left_out": {},
        "rows": 3,
        "read": 3,
        "bad_rows": {},
        "duplicates": 0,
        "repeated_paragraphs": 0,
        "documents": 3,
    }


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"text": "a", "number": ' + "1" * 5000 + "}", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"title": "x"}, "not exactly one of `text`, `messages`, `completion`"),
        ({"text": "x", "completion": "y"}, "not exactly one of `text`, `messages`, `completion`"),
        ({"text": 5}, "`text` is not a string"),
        ({"text": " \n"}, "`text` is empty"),
        ({"text": "\0"}, "`text` is empty"),
        ({"text": "x", "group": 4}, "`group` is not a string"),
        ({"completion": "y"}, "`prompt` is not a string"),
        ({"prompt": "x", "completion": ""}, "`completion` is empty"),
        ({"messages": []}, "`messages` is not a list with at least one message"),
        ({"messages": ["x"]}, "a message is not an object"),
        ({"messages": [{"role": "user", "content": [1]}]}, "the content of a message is no text"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "the content of a message is no text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "the content of a message is no text",
        ),
        (
            {"messages": [{"role": "critic", "content": "x"}]},
            "a message's role is not one of system, user, assistant",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "no assistant message"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
    ],
)
def test_counts_bad_rows_with_file_and_line(tmp_path: Path, row: object, reason: str) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [{"text": "a good row"}, row])
    documents, report = read_documents([path])
    assert [document.content for document in documents] == [PlainText("a good row")]
    assert dict(report.bad_rows) == {reason: 1}
    assert report.examples == [f"{path}:2: {reason}"]


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"text": "one\r\ntwo\rthree\0", "messages": None, "prompt": None}, PlainText("one\ntwo\nthree")),
        ({"text": "\ufeffa cut emoji \ud83d"}, PlainText("a cut emoji \ufffd")),
        ({"prompt": "a\r\n", "completion": "b\r\n", "text": None}, Completion("a\n", "b\n")),
        (
            {
                "messages": [
                    {"role": "developer", "content": "Be\r\nbrief."},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "2+2"}, {"type": "text", "text": "?"}],
                    },
                    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
                    {"role": "tool", "content": "4", "tool_call_id": "1"},
                    {"role": "assistant", "content": "Four \udc00"},
                ]
            },
            Conversation((("system", "Be\nbrief."), ("user", "2+2\n?"), ("assistant", "Four \ufffd"))),
        ),
    ],
)
def test_rows_of_other_programs_are_their_text(tmp_path: Path, row: object, content: object) -> None:
    documents, report = read_documents([_jsonl(tmp_path / "a.jsonl", [row])])
    assert [document.content for document in documents] == [content]
    assert not report.bad_rows


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_rows_end_at_any_line_end_and_are_counted_once(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(end.join(['{"text": "one"}', '{"text": "two"}', "", "bad", ""]).encode())
    documents, report = read_documents([path])
    assert [document.content for document in documents] == [PlainText("one"), PlainText("two")]
    assert report.examples == [f"{path}:4: not JSON"]


def test_counts_rows_that_are_too_long_or_in_another_charset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MAX_ROW_BYTES", 40)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n{"text": "' + b"x" * 50 + b'"}\n\n')
    (tmp_path / "b.txt").write_bytes(b"\xff\xfea\0 \0b\0")
    (tmp_path / "c.txt").write_bytes(b" \n")
    _, report = read_documents([tmp_path])
    assert dict(report.bad_rows) == {"longer than 40 bytes": 1, "empty": 1}
    assert sum(report.charsets.values()) == 2


def test_counts_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("One text.")
    (tmp_path / "b.txt").write_text("Another text.")
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "b.txt":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    documents, report = read_documents([tmp_path])
    assert len(documents) == 1
    assert report.bad_rows == {"cannot be read: Permission denied": 1}


def test_a_file_that_is_moved_while_its_folder_is_read_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("One text.")
    (tmp_path / "b.txt").write_text("Another text.")

    def move(path: Path) -> str:
        if path.name == "b.txt":
            path.unlink()
        return ".txt"

    monkeypatch.setattr(sources, "text_kind", move)
    documents, report = read_documents([tmp_path])
    assert (len(documents), report.files) == (1, 2)
    assert report.bad_rows == {"cannot be read: No such file or directory": 1}


def test_reads_folders_in_order_without_hidden_files_links_and_other_kinds(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "b.txt").write_text("second")
    (folder / "a.txt").write_text("\ufefffirst")
    (folder / "sub" / "c.TXT").write_text("third")
    (folder / ".hidden" / "d.txt").write_text("hidden")
    (folder / "photo.jpg").write_text("no text")
    (tmp_path / "outside.txt").write_text("outside")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    documents, report = read_documents([folder, folder / "a.txt"])
    assert [characters(document.content) for document in documents] == ["first", "second", "third"]
    assert (report.files, report.ignored) == (3, {"link": 1, "hidden": 1, ".jpg": 1})


def test_a_source_that_cannot_be_used_is_counted_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_text("x")
    (tmp_path / "good.md").write_text("a good text")
    (tmp_path / "big.txt").write_text("x" * 100)
    monkeypatch.setattr(sources, "MAX_TOTAL_BYTES", 99)
    documents, report = read_documents(
        [tmp_path / name for name in ("missing.txt", "a.png", "big.txt", "good.md")]
    )
    assert [characters(document.content) for document in documents] == ["a good text"]
    assert report.summary() == (
        "4 files: 1 read, 3 skipped: 1 x not found, 1 x not .txt, .md, .jsonl, .html, .eml, .mbox, .pdf, "
        ".docx, .rtf, .csv, .emlx, .json, .odt, .text, .org, .rst, .adoc, .tsv, .docm, .markdown, .mdown, "
        ".mkd, .htm or .xhtml, 1 x over the limit of 99 bytes in all"
    )


def test_refuses_where_there_is_no_text_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="at least one file"):
        read_documents([])
    with pytest.raises(InputError, match=r"There is no file or folder "):
        read_documents([tmp_path / "empty.jsonl", tmp_path / "missing.txt"])


def test_markdown_is_plain_text_without_its_front_matter(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("---\ntitle: Peas\n---\n# Peas\n\nSow *early*.\n")
    (tmp_path / "b.MD").write_text("--- no front matter\n\nText\n---\nmore")
    documents, _ = read_documents([tmp_path])
    texts = [characters(document.content) for document in documents]
    assert texts == ["# Peas\n\nSow *early*.", "--- no front matter\n\nText\n---\nmore"]


def test_leaves_out_duplicates_by_what_they_say(tmp_path: Path) -> None:
    rows: list[object] = [
        {"text": "The Same  text"},
        {"text": "the same text"},
        {"text": "ｔｈｅ same text\n"},
        {"text": "another text"},
        {"prompt": "p", "completion": "c"},
        {"prompt": "P", "completion": "c "},
    ]
    documents, report = read_documents([_jsonl(tmp_path / "a.jsonl", rows)])
    assert len(documents) == 3
    assert report.duplicates == 3
    assert normalised("ＡB\n c") == "ab c"


def test_leaves_out_long_paragraphs_that_came_before(tmp_path: Path) -> None:
    signature = "With kind regards from the whole crew of the harbour office, second floor, door nine."
    rows: list[object] = [
        {"text": f"First letter.\n\n{signature}"},
        {"text": f"Second letter.\n\n{signature}\n\nYes."},
        {"text": "Third.\n\nYes."},
        {"text": signature + "\n"},
    ]
    documents, report = read_documents([_jsonl(tmp_path / "a.jsonl", rows)])
    texts = [characters(document.content) for document in documents]
    assert texts == [f"First letter.\n\n{signature}", "Second letter.\n\nYes.", "Third.\n\nYes."]
    assert report.repeated_paragraphs == 2


def test_cuts_long_texts_into_contiguous_blocks_and_leaves_short_ones_whole(tmp_path: Path) -> None:
    story = "\n\n".join(sentences(200))
    (tmp_path / "one.txt").write_text(story)
    short: list[object] = [{"text": f"{number}: {story[:500]}{number}"} for number in range(3)]
    blocks, _ = read_documents([tmp_path / "one.txt"])
    whole, _ = read_documents([_jsonl(tmp_path / "short.jsonl", short)])
    assert "\n\n".join(characters(document.content) for document in blocks) == story
    assert all(BLOCK_CHARACTERS <= len(characters(block.content)) < 1800 for block in blocks[:-1])
    assert len({block.group for block in blocks}) == len(blocks)
    assert [block.continues for block in blocks] == [False] + [True] * (len(blocks) - 1)
    assert len(whole) == len({document.group for document in whole}) == 3


@pytest.mark.parametrize("more", ["\n\nAnd then it rained for days.", " And on. " * 300, "\nA line.\n" * 500])
def test_text_that_is_appended_moves_nothing_that_was_there(tmp_path: Path, more: str) -> None:
    story = "\n\n".join(sentences(200))
    before = _blocks(tmp_path, story)
    after = _blocks(tmp_path, story + more)
    assert len(after) >= len(before) > 5
    assert [group for group, _ in after][: len(before)] == [group for group, _ in before]
    assert after[: len(before) - 1] == before[:-1]
    assert after[len(before) - 1][1].startswith(before[-1][1])


def _blocks(folder: Path, text: str) -> list[tuple[str, str]]:
    (folder / "diary.txt").write_text(text)
    documents, _ = read_documents([folder / "diary.txt"])
    return [(document.group, characters(document.content)) for document in documents]


def test_rows_of_one_group_have_one_group_and_are_not_cut(tmp_path: Path) -> None:
    rows: list[object] = [
        {"text": "x " * 2000, "group": "diary"},
        {"text": "y", "group": "diary"},
        {"text": "z"},
    ]
    documents, _ = read_documents([_jsonl(tmp_path / "a.jsonl", rows)])
    assert len(documents) == 3
    assert documents[0].group == documents[1].group != documents[2].group


@pytest.mark.parametrize("text", ["word " * 900, "x" * 2500, "line\n" * 700, "a\n\n" * 900])
def test_sections_hold_the_whole_text_in_order(text: str) -> None:
    pieces = sections(text, BLOCK_CHARACTERS)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(BLOCK_CHARACTERS <= len(piece) <= 2 * BLOCK_CHARACTERS for piece in pieces[:-1])


def test_pipes_and_devices_are_named_as_what_they_are_and_nothing_waits_for_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zeros.txt").symlink_to("/dev/zero")
    (tmp_path / "notes.txt").write_text("some text")
    sources = [tmp_path / name for name in ("pipe.txt", "zeros.txt", "notes.txt", "none.txt")]
    documents, report = read_documents([*sources, Path("/dev/zero")])
    assert len(documents) == 1
    assert dict(report.bad_rows) == {"not a regular file": 3, "not found": 1}
