"""Tests that each path below a folder is accounted for: read, skipped for a reason, or ignored."""

import json
import os
import socket
from collections import Counter
from pathlib import Path

import pytest

from permille_agent.state.home import open_home, read_record, write_record
from permille_agent.text.documents import characters
from permille_agent.text.reading import survey
from permille_agent.text.report import DataReport, shown
from permille_agent.training.outcome import TextSource

PLUMS = "The plums ripened early. Number {}."
MAIL = "From: Ann <ann@example.org>\nSubject: x\n\n"
LATIN1 = os.fsdecode(b"caf\xe9.txt")


def _odd_folder(root: Path) -> tuple[int, Counter[str], Counter[str]]:
    """Fill a folder. Return the number of rows to read, reasons to skip others, and ignored kinds."""
    number = 0

    def text() -> str:
        nonlocal number
        number += 1
        return PLUMS.format(number)

    for ending in ("txt", "text", "TXT", "md", "markdown", "mdown", "mkd", "org", "rst", "rtf", "csv"):
        (root / f"note {ending}.{ending}").write_text(text())
    for codec in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
        (root / f"{codec}.txt").write_bytes(text().encode(codec))
    for codec, words in [("cp1252", "Größe, schön"), ("koi8_r", "Сегодня дождь"), ("cp932", "今日は庭で")]:
        (root / f"{codec}.txt").write_bytes(f"{words} {text()}".encode(codec))
    (root / LATIN1).write_text(text())
    (root / "two\nlines.txt").write_text(text())
    (root / "[bold]name.md").write_text(f"---\ntags: x\n---\n{text()}")
    (root / "old mac.txt").write_text(f"{text()}\rNext line.")
    for name in ("page.html", "page.htm", "page.xhtml"):
        (root / name).write_text(f"<p>{text()}</p>")
    (root / "one.eml").write_text(MAIL + text())
    (root / "one.emlx").write_text(f"{len(mail := MAIL + text())}\n{mail}<plist/>")
    box = "".join(f"From - Mon Jan  1 00:00:01 2024\n{MAIL}{text()}\n\n" for _ in range(3))
    (root / "sent.mbox").write_text(box)
    (root / "Inbox").write_text(f"From - Mon Jan  1 00:00:01 2024\n{MAIL}{text()}\n")
    for folder in ("Maildir", "Maildir/.Sent"):
        for name in ("cur", "new", "tmp"):
            (root / folder / name).mkdir(parents=True)
            (root / folder / name / "1700000000.M1P1.host:2,S").write_text(MAIL + text())
    number -= 2  # mails in `tmp` are not complete
    (root / "_chat.txt").write_text(
        f"[12/03/24, 10:00:11] Jo: {text()}\n[12/03/24, 10:00:12] Jo: <Media omitted>"
    )
    turns = [{"type": "message", "date": "2024-03-12", "from": "Jo", "text": text()}]
    (root / "result.json").write_text(json.dumps({"messages": turns}))
    (root / "rows.jsonl").write_text(
        f"{json.dumps({'text': text()})}\n{{bad\n\n{json.dumps({'text': text()})}"
    )
    (root / "rows16.jsonl").write_text(f"{json.dumps({'text': text()})}\n", encoding="utf-16")
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "note.txt").write_text(text())
    read = number

    (root / "empty.txt").touch()
    (root / "empty.jsonl").touch()
    (root / "empty.mbox").touch()
    (root / "picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (root / "cut.pdf").write_bytes(b"%PDF-1.4 cut")
    (root / "no.docx").write_bytes(b"PK no")
    (root / "conversations.json").write_text("{}")
    os.mkfifo(root / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(root / "socket.txt"))
    skipped = Counter({"empty": 3, "not JSON": 1, "holds bytes that are no text": 1, "not a regular file": 2})
    skipped.update(
        ["damaged, or no .pdf file", "damaged, or no .docx file", "not a ChatGPT or Telegram export"]
    )

    for name in ("a.jpg", "b.JPG", "c.zip", "d.log", "settings.json", "README", "x.a-b", "1.0 of May"):
        (root / name).write_text("no text for us")
    (root / ".git").mkdir()
    for name in (".git/a.txt", ".hidden.txt", "~$open.docx"):
        (root / name).write_text("hidden")
    (root / "link.txt").symlink_to(root / "note txt.txt")
    (root / "dangling.txt").symlink_to(root / "nowhere")
    (root / "deep" / "circle").symlink_to(root.resolve())
    ignored = Counter(
        {".jpg": 2, "link": 3, "hidden": 3, "no known ending": 5, ".zip": 1, ".log": 1, ".json": 1}
    )
    return read, skipped, ignored


def test_a_folder_of_odd_files_is_accounted_for_to_the_last_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    root = Path("odd")
    root.mkdir()
    read, skipped, ignored = _odd_folder(root)

    documents, report = survey([root])

    assert (report.read, report.bad_rows, report.ignored) == (read, skipped, ignored)
    paths = [Path(folder) / name for folder, _, names in os.walk(root) for name in names]
    assert len(paths) > 60
    # A link to a folder is ignored, too, and `os.walk` lists it as a folder.
    assert report.files + report.ignored.total() == len(paths) + 1
    assert report.rows == report.read + report.bad_rows.total()
    texts = [characters(document.content) for document in documents]
    assert sum("The plums ripened early." in one for one in texts) == len(texts) == read
    assert not any(
        word in "".join(texts) for word in ("\r", "\0", "tags:", "<p>", "Subject", "omitted", "12/03")
    )
    assert report.left_out == {"front matter": 1, "notice or placeholder of a chat": 1}
    assert report.charsets.total() == 9
    words = report.summary()
    assert "ignored: 5 x no known ending, 3 x link, 3 x hidden, 2 x .jpg" in words and "1 x cp1252" in words
    assert "1 x .zip (unpack it), 1 x .log" in words


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("One text.")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    _, report = survey([tmp_path])
    assert report.examples == [f"{tmp_path}/closed: cannot be read: Permission denied"]
    assert (report.files, report.read) == (2, 1)


def test_a_name_that_is_not_utf8_is_shown_in_one_line_that_every_record_can_hold(tmp_path: Path) -> None:
    bad = tmp_path / os.fsdecode(b"caf\xe9\n.txt")
    bad.touch()
    _, report = survey([bad])
    assert report.examples == [f"{shown(tmp_path)}/caf\\xe9\\n.txt: empty"]
    home = open_home(tmp_path / "home")
    record = TextSource(bad_rows=tuple(report.examples))
    write_record(home.data, record)
    assert read_record(home.data, TextSource) == record


def test_a_named_file_of_a_kind_that_is_not_read_comes_with_advice(tmp_path: Path) -> None:
    (tmp_path / "mails.PST").write_text("x")
    _, report = survey([tmp_path / "mails.PST"])
    assert report.examples[0].endswith("(save it as .eml or .mbox)")


def test_the_account_says_nothing_of_what_is_not_there() -> None:
    assert DataReport(files=1, read=1).summary() == "1 file: 1 read, 0 skipped"
