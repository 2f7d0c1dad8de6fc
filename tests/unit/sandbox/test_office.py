"""Tests that Word and OpenDocument files are read as their reader sees them, with no text lost."""

import zipfile
from io import BytesIO

import docx
import pytest

from permille.sandbox.decoding import UnreadableError
from permille.sandbox.documents import texts_of

ODT = (
    '<office:document-content xmlns:office="o" xmlns:text="t" xmlns:table="b"><office:body><office:text>'
    "<text:tracked-changes><text:p>We sold the peas.</text:p></text:tracked-changes>{}"
    "</office:text></office:body></office:document-content>"
)


def _archive(parts: dict[str, str]) -> bytes:
    held = BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return held.getvalue()


def _word(changed: str, **parts: str) -> bytes:
    """Return a file of python-docx in which other elements stand in place of a paragraph."""
    document, held = docx.Document(), BytesIO()
    document.add_paragraph("Dear Anna,")
    document.add_paragraph("HERE")
    document.save(held)
    with zipfile.ZipFile(held) as archive:
        read = {name: archive.read(name).decode("latin-1") for name in archive.namelist()}
    read["word/document.xml"] = read["word/document.xml"].replace(
        "<w:p><w:r><w:t>HERE</w:t></w:r></w:p>", changed
    )
    return _archive(read | {f"word/{name}.xml": text for name, text in parts.items()})


def _text(kind: str, data: bytes) -> str:
    (found,) = texts_of(kind, data)
    return found.text


def test_the_parts_of_a_word_file_may_be_numbered() -> None:
    with zipfile.ZipFile(BytesIO(_word("<w:p><w:r><w:t>We hoed.</w:t></w:r></w:p>"))) as archive:
        read = {name: archive.read(name).decode("latin-1") for name in archive.namelist()}
    read["word/document2.xml"] = read.pop("word/document.xml")
    assert _text(".docx", _archive(read)) == "Dear Anna,\n\nWe hoed."


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ("<w:p><w:ins><w:r><w:t>We hoed.</w:t></w:r></w:ins></w:p>", "We hoed."),
        ("<w:p><w:r><w:t>We </w:t></w:r><w:del><w:r><w:delText>dug</w:delText></w:r></w:del></w:p>", "We"),
        ("<w:sdt><w:sdtContent><w:p><w:r><w:t>We hoed.</w:t></w:r></w:p></w:sdtContent></w:sdt>", "We hoed."),
        ("<w:p><w:smartTag><w:r><w:t>We hoed.</w:t></w:r></w:smartTag></w:p>", "We hoed."),
        ("<w:p><w:hyperlink><w:r><w:t>We hoed.</w:t></w:r></w:hyperlink></w:p>", "We hoed."),
        (
            "<w:p><w:r><w:pict><w:txbxContent><w:p><w:r><w:t>We hoed.</w:t></w:r></w:p></w:txbxContent>"
            "</w:pict></w:r></w:p>",
            "We hoed.",
        ),
        (
            "<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr><w:r><w:t>a</w:t><w:tab/><w:br/><w:t>b</w:t></w:r></w:p>",
            "a\t\nb",
        ),
        ("<w:p><w:r><w:instrText>PAGE</w:instrText><w:t>We hoed.</w:t></w:r></w:p>", "We hoed."),
    ],
)
def test_word_text_is_read_in_every_element_and_without_what_was_deleted(changed: str, text: str) -> None:
    assert _text(".docx", _word(changed)) == f"Dear Anna,\n\n{text}"


def test_notes_of_word_follow_the_text() -> None:
    note = "<w:footnote><w:p><w:r><w:t>In May.</w:t></w:r></w:p></w:footnote>"
    note = f'<w:footnotes xmlns:w="w">{note}</w:footnotes>'
    assert _text(".docx", _word("", footnotes=note)) == "Dear Anna,\n\nIn May."


def test_open_document_text_is_its_paragraphs_rows_and_notes() -> None:
    cell = "<table:table-cell><text:p>{}</text:p></table:table-cell>"
    body = (
        "<text:h>Garden</text:h><text:p>We <text:span>sowed</text:span> peas<text:s/>and<text:tab/>beans."
        "<office:annotation><text:p>Jo, 2024</text:p></office:annotation>"
        "<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>In May.</text:p>"
        "</text:note-body></text:note></text:p><text:p/><text:list><text:list-item><text:p>hoe</text:p>"
        f"</text:list-item></text:list><table:table><table:table-row>{cell.format('bed')}{cell.format(7)}"
        "</table:table-row></table:table>"
    )
    text = _text(".odt", _archive({"content.xml": ODT.format(body)}))
    assert text == "Garden\n\nWe sowed peas and\tbeans.\nIn May.\n\nhoe\n\nbed\t7"


def test_a_word_file_with_a_password_is_named_as_such() -> None:
    with pytest.raises(UnreadableError, match="password"):
        texts_of(".docx", bytes.fromhex("d0cf11e0a1b11ae1") + bytes(500))


@pytest.mark.parametrize("kind", [".docx", ".odt"])
def test_an_archive_of_another_kind_is_damaged(kind: str) -> None:
    with pytest.raises(KeyError):
        texts_of(kind, _archive({"photo.xml": "<x/>"}))
