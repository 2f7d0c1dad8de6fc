"""Tests of document formats: intact, damaged, too long, and without the library that reads them."""

import os
from email.message import EmailMessage
from pathlib import Path

import docx
import pytest

from permille.errors import InputError
from permille_agent.text import reading
from permille_agent.text.documents import PlainText
from permille_agent.text.reading import read_documents, survey
from permille_agent.text.report import DataReport


def _texts(*paths: Path) -> tuple[list[str], DataReport]:
    documents, report = read_documents(paths)
    return [one.content.text for one in documents if isinstance(one.content, PlainText)], report


def _pdf(path: Path, *pages: str) -> Path:
    """Write a PDF file by hand, with one line on each page."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {len(pages)}/Kids[{kids}]>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, text in enumerate(pages):
        content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects.append(
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents {5 + 2 * number} 0 R"
            "/Resources<</Font<</F1 3 0 R>>>>>>"
        )
        objects.append(f"<</Length {len(content)}>>stream\n{content}\nendstream")
    data, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(data))
        data += f"{number} 0 obj{body}endobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    data += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    path.write_text(
        f"{data}trailer<</Root 1 0 R/Size {len(objects) + 1}>>\nstartxref\n{data.index('xref')}\n%%EOF"
    )
    return path


def _message(text: str, *, subtype: str = "plain") -> EmailMessage:
    message = EmailMessage()
    message["From"], message["Subject"] = "anna@example.org", "The garden"
    message.set_content(text, subtype=subtype)
    return message


def test_pages_of_a_pdf_are_one_text(tmp_path: Path) -> None:
    texts, _ = _texts(_pdf(tmp_path / "notes.pdf", "The river is high today.", "We stay at home."))
    assert texts == ["The river is high today.\n\nWe stay at home."]


def test_a_pdf_with_the_name_of_a_text_is_read_as_a_pdf(tmp_path: Path) -> None:
    texts, _ = _texts(_pdf(tmp_path / "notes.txt", "The river is high today."))
    assert texts == ["The river is high today."]


def test_paragraphs_and_tables_of_a_word_file_are_read_in_their_order(tmp_path: Path) -> None:
    document = docx.Document()
    document.add_paragraph("Dear Anna,")
    table = document.add_table(rows=1, cols=2)
    table.cell(0, 0).text, table.cell(0, 1).text = "beans", "in May"
    document.add_paragraph("Yours, Ben")
    document.save(str(tmp_path / "letter.docx"))
    texts, _ = _texts(tmp_path / "letter.docx")
    assert texts == ["Dear Anna,\n\nbeans\tin May\n\nYours, Ben"]


def test_a_page_of_html_is_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        "<html><head><title>T</title><style>p {}</style></head><body><h1>Garden</h1><script>let x = '</p>'"
        "</script><p>The <b>first</b>\n bean &amp; the last.<br>A line</p></div></body></html>"
    )
    texts, _ = _texts(tmp_path / "page.html")
    assert texts == ["Garden\n\nThe first bean & the last.\n\nA line"]


def test_the_end_of_the_head_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<html><head><title>T</title><body><p>The first bean.</p></html>")
    assert _texts(tmp_path / "page.html")[0] == ["The first bean."]


def test_mail_is_its_text_without_what_it_quotes(tmp_path: Path) -> None:
    mixed = _message("See you at the well.\n> When do we meet?\n")
    mixed.add_alternative("<p>See you</p>", subtype="html")
    mixed.add_attachment(b"\x00\x01", maintype="application", subtype="octet-stream", filename="a.bin")
    (tmp_path / "one.eml").write_bytes(mixed.as_bytes())
    page = _message("<p>Only <i>a page</i></p><p>of two parts</p>", subtype="html")
    lines = _message("First line\nFrom here on it is ours.\n")
    box = b"".join(
        b"From anna@example.org Mon Nov 23 10:00:00 2026\n"
        + one.as_bytes().replace(b"\nFrom here", b"\n>From here")
        + b"\n"
        for one in (page, lines)
    )
    (tmp_path / "sent.mbox").write_bytes(box)

    texts, report = _texts(tmp_path)

    assert texts == [
        "See you at the well.",
        "Only a page\n\nof two parts",
        "First line\nFrom here on it is ours.",
    ]
    assert (report.files, report.rows, report.read) == (2, 3, 3)


def test_a_mail_without_text_costs_its_mailbox_no_other(tmp_path: Path) -> None:
    damage = b"Content-Type: image/png; charset=none-such\n\nBuy!\n"
    box = b"From spam\n" + damage + b"\nFrom anna\n" + _message("See you at the well.").as_bytes()
    (tmp_path / "all.mbox").write_bytes(box)
    texts, report = _texts(tmp_path)
    assert texts == ["See you at the well."]
    assert report.examples == [f"{tmp_path}/all.mbox, message 1: a mail without text"]


def test_a_document_that_cannot_be_read_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4 no more of it")
    (tmp_path / "b.docx").write_bytes(b"PK\x03\x04 no archive")
    (tmp_path / "c.html").write_bytes(b"<p>\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\xff</p>")
    (tmp_path / "d.mbox").write_bytes(b"")
    (tmp_path / "e.eml").write_bytes(b"Subject: nothing\n\n")
    _pdf(tmp_path / "g.pdf")  # the list of its pages is damaged
    (tmp_path / "f.html").write_text("<p>The one that is well.</p>")
    texts, report = _texts(tmp_path)
    assert texts == ["The one that is well."]
    named = [example.removeprefix(f"{tmp_path}/").split(":")[0] for example in report.examples]
    assert named == ["a.pdf", "b.docx", "c.html", "d.mbox", "e.eml", "g.pdf"]
    assert report.examples[-1].endswith("g.pdf: damaged: it has no pages")
    assert report.examples[0].endswith("a.pdf: damaged, or no .pdf file")


def test_a_document_that_is_too_long_or_takes_too_long_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.html").write_text("<p>Short</p>")
    with monkeypatch.context() as patch:
        patch.setattr(reading, "MAX_DOCUMENT_BYTES", 5)
        assert "longer than 5 bytes" in survey([tmp_path])[1].examples[0]
    with monkeypatch.context() as patch:
        patch.setattr("permille.sandbox.process.CALL_S", 0.0)
        assert "too long" in survey([tmp_path])[1].examples[0]
    assert _texts(tmp_path)[0] == ["Short"]


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub/pypdf.py").write_text("raise ModuleNotFoundError('none', name='pypdf')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'stub'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(InputError, match=r"pip install 'permille\[documents\]'"):
        read_documents([_pdf(tmp_path / "notes.pdf", "The river")])
