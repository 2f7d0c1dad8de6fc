"""Tests of mail, mailboxes, pages, tables and RTF as they are found, and not as they should be."""

import base64
from email.message import EmailMessage

import pytest

from permille.sandbox import documents
from permille.sandbox.documents import texts_of


def _texts(kind: str, data: bytes | str) -> list[str]:
    found = texts_of(kind, data if isinstance(data, bytes) else data.encode())
    return [one.text.strip() or f"skipped: {one.reason}" for one in found]


FROM = "From ann@example.org Mon Jan  1 00:00:01 2024\n"
HEAD = "From: Ann <ann@example.org>\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\n"


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "line",
    [
        "From time to time I think of the mill.",
        "From 10:30 until 2024 nobody came.",
        ">From the hill one sees it.",
        "From: here it is near.",
    ],
)
def test_a_line_of_a_mail_that_begins_with_from_stays_in_it(line: str, ends: str) -> None:
    box = f"{FROM}{HEAD}\nDear Jo,\n\n{line}\nIt stands yet.\n\n{FROM}{HEAD}\nSecond.\n".replace("\n", ends)
    assert _texts(".mbox", box) == [f"Dear Jo,\n\n{line.lstrip('>')}\nIt stands yet.", "Second."]


@pytest.mark.parametrize(
    "above",
    [
        FROM,
        "From 17@xxx Mon Jan 01 00:00:00 +0000 2024\n",
        "From - Mon, 1 Jan 2024 00:00:00 +0000\n",
        "From \n",
        "From MAILER-DAEMON\n",
    ],
)
def test_mails_are_divided_by_the_lines_of_many_programs(above: str) -> None:
    assert _texts(".mbox", f"{above}{HEAD}\nOne.\n\n{above}{HEAD}\nTwo.\n") == ["One.", "Two."]


def test_a_known_length_keeps_a_whole_mailbox_in_a_mail() -> None:
    body = f"See:\n\n{FROM}{HEAD}\nInner.\n"
    box = f"{FROM}{HEAD}Content-Length: {len(body)}\n\n{body}\n{FROM}{HEAD}\nTwo.\n"
    assert [text.endswith("Inner.") for text in _texts(".mbox", box)] == [True, False]
    wrong = f"{FROM}{HEAD}Content-Length: 99999\n\nOne.\n\n{FROM}{HEAD}Content-Length: 1\n\nTwo.\n"
    assert _texts(".mbox", wrong) == ["One.", "Two."]


def test_a_mail_that_takes_too_long_costs_a_mailbox_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAIL_S", 0.1)
    page = "Content-Type: text/html\n\n" + "<!--" * 100_000
    assert _texts(".mbox", f"{FROM}{page}\n\n{FROM}{HEAD}\nTwo.\n") == [
        "skipped: takes too long to read",
        "Two.",
    ]


def test_odd_mails_cost_a_mailbox_no_other() -> None:
    odd = [
        "Content-Type: text/html\n\n<p>Hello</p><![FOR]><![if !mso]><p>there</p>",
        "Content-Type: text/plain; charset=none-such\n\nStill read.",
        "Content-Type: text/plain; charset*=utf-8''%ff; boundary*0=x\n\nStill read, too.",
        "Content-Type: multipart/mixed; boundary=x\n\n--x\n\nWithout an end.",
        "Content-Type: ;;;\nFrom: =?x?y?z\nTo: <<<>\n\nWith bad headers.",
        "Content-Transfer-Encoding: base64\n\n%%%not base64",
        "Content-Type: image/png\n\nxx",
        "no header at all",
    ]
    texts = _texts(".mbox", "".join(f"{FROM}{one}\n\n" for one in odd))
    assert texts[:5] == [
        "Hello\n\nthere",
        "Still read.",
        "Still read, too.",
        "Without an end.",
        "With bad headers.",
    ]
    assert texts[6] == "skipped: a mail without text"
    assert len(texts) == len(odd)


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        ("koi8-r", "koi8_r", "Привет, сад"),
        ("shift_jis", "cp932", "今日は庭"),
        ("gb2312", "gb18030", "今天镕"),
        ("iso-8859-1", "cp1252", "“schön”"),
        ("x-unknown", "utf-8", "schön"),
        ("us-ascii", "utf-8", "schön"),
    ],
)
def test_a_mail_is_decoded_by_its_charset_and_encoding(label: str, codec: str, text: str) -> None:
    data = text.encode(codec)
    head = f"Content-Type: text/plain; charset={label}\n"
    quoted = "".join(f"={byte:02X}" for byte in data)
    encoded = base64.b64encode(data).decode()
    assert _texts(".eml", f"{head}Content-Transfer-Encoding: quoted-printable\n\n{quoted}=\n\n") == [text]
    assert _texts(".eml", f"{head}Content-Transfer-Encoding: base64\n\n{encoded}\n") == [text]
    assert _texts(".eml", f"{head}Content-Transfer-Encoding: Base64 \t\n\n{encoded}\n") == [text]
    assert _texts(".eml", f"{head}Content-Transfer-Encoding: 8bit\n\n".encode() + data) == [text]


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16"])
def test_mail_that_an_editor_has_saved_is_read(codec: str) -> None:
    mail = "From: Jo\nContent-Type: text/plain; charset=us-ascii\n\nSchöne Pflaumen.\n"
    assert _texts(".eml", mail.encode(codec)) == ["Schöne Pflaumen."]
    box = f"From jo Mon Jan  1 10:00:00 2024\n{mail}\nFrom jo Tue Jan  2 10:00:00 2024\n{mail}"
    assert _texts(".mbox", box.encode(codec)) == ["Schöne Pflaumen."] * 2
    assert _texts(".mbox", box.replace("\n", "\r").encode(codec)) == ["Schöne Pflaumen."] * 2


@pytest.mark.parametrize(
    "coded",
    [
        "-----BEGIN PGP MESSAGE-----\nVersion: 1\n\nhQEMA1234+/\n=ab12\n-----END PGP MESSAGE-----\n",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "begin 644 plums.gif\nM1TE&.#EA`0`!\n#0V%T\n`\nend\n",
    ],
)
def test_what_programs_encode_within_a_mail_is_left_out(coded: str) -> None:
    assert _texts(".eml", f"{HEAD}\nSee below.\n\n{coded}") == ["See below."]
    assert _texts(".eml", f"{HEAD}\nbegin 644 rows\nand end\n") == ["begin 644 rows\nand end"]


def test_all_parts_that_a_mail_shows_are_read_and_no_other() -> None:
    inner = EmailMessage()
    inner.set_content("Before the picture.")
    inner.add_alternative("<p>Before the picture.</p>", subtype="html")
    mail = EmailMessage()
    mail.make_mixed()
    mail.attach(inner)
    for text, how in [("After it.", "inline"), ("A file.", "attachment")]:
        part = EmailMessage()
        part.set_content(text, disposition=how)
        mail.attach(part)
    forwarded = EmailMessage()
    forwarded.set_content("Somebody else.")
    mail.add_attachment(forwarded)
    assert _texts(".eml", mail.as_bytes()) == ["Before the picture.\n\nAfter it."]


@pytest.mark.parametrize(
    "quotation",
    [
        "> When?\n> Tomorrow?\n",
        "On Mon, Jan 1, 2024 at 10:02 AM Jo <jo@example.org> wrote:\n> When?\n",
        "Am 1.1.2024 um 10:02 schrieb Jo\n<jo@example.org>:\n\n> When?\n",
        "-----Original Message-----\nFrom: Jo\nSent: Monday\n\nWhen?\n",
        "________________________________\nVon: Jo\nGesendet: Montag\n\nWhen?\n",
        "-------- Original Message --------\nSubject: x\nDate: Monday\nFrom: Jo\n\nWhen?\n",
        "Von: Jo <jo@example.org>\nGesendet: Montag, 1. Januar 2024 10:02\nAn: Ann\nBetreff: x\n\nWhen?\n",
        "De : Jo\nEnvoyé : lundi\nObjet : x\n\nWhen?\n",
        "Sent from my phone\n",
        "Von meinem iPhone gesendet\n\n> When?\n",
    ],
)
def test_a_mail_is_read_without_what_it_quotes(quotation: str) -> None:
    assert _texts(".eml", f"{HEAD}\nAt noon, by the well:\nbring plums.\n\n{quotation}") == [
        "At noon, by the well:\nbring plums."
    ]


def test_a_page_of_mail_is_read_without_the_mail_below_it() -> None:
    fields = (
        "<p><b>From:</b> Jo<br><b>Sent:</b> Monday<br><b>To:</b> Ann<br><b>Subject:</b> x</p><p>When?</p>"
    )
    assert _texts(".eml", f"Content-Type: text/html\n\n<p>At noon.</p><div>{fields}</div>") == ["At noon."]


@pytest.mark.parametrize(
    "text",
    [
        "--- shopping ---\nMilk: two bottles\nBread: one",
        "---------- peas ----------\n\nRow one: sown.",
        "From: the mill\nOver: the bridge\nBy: the well",
        "From: here it is near.\nDate: none yet.\nWe go.",
        "Sent from my garden came two baskets.\nAnd more.",
    ],
)
def test_lists_of_a_person_are_no_quotation(text: str) -> None:
    assert _texts(".eml", f"{HEAD}\n{text}\n") == [text]


def test_a_signed_mail_is_its_text() -> None:
    signed = (
        "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\nAt noon.\n\n-----BEGIN PGP SIGNATURE-----\n"
        "Comment: none\n\niQEzBAEB\n-----END PGP SIGNATURE-----\n"
    )
    assert _texts(".eml", f"{HEAD}\n{signed}") == ["At noon."]


def test_a_quotation_in_a_page_is_left_out_of_mail_only() -> None:
    page = "<p>At noon.</p><div>On Jan 1, Jo wrote:</div><blockquote><p>When?</p></blockquote><p>Yes.</p>"
    assert _texts(".eml", f"Content-Type: text/html\n\n{page}") == ["At noon.\n\nYes."]
    assert _texts(".html", page) == ["At noon.\n\nOn Jan 1, Jo wrote:\n\nWhen?\n\nYes."]


def test_soft_line_breaks_are_joined() -> None:
    head = "Content-Type: text/plain; format=flowed\n\n"
    assert _texts(".eml", f"{head}One line \nof two.\nAnother.\n-- \nAnn") == [
        "One line of two.\nAnother.\n-- \nAnn"
    ]
    head = "Content-Type: text/plain; format=flowed; DelSp=yes; charset=utf-8\n\n"
    assert _texts(".eml", f"{head}One line  \nof two. \n庭の \n木です。") == ["One line of two.庭の木です。"]


def test_the_note_of_a_mail_program_in_a_mailbox_is_skipped() -> None:
    note = f"From a Mon Jan  1 10:00:00 2024\nX-IMAP: 1 2\n{HEAD}\nNot a real message.\n"
    mail = f"\nFrom a Mon Jan  1 10:00:00 2024\nX-IMAPbase: 1 2\n{HEAD}\nAt noon.\n"
    assert _texts(".mbox", note + mail) == ["skipped: a note of a mail program to itself", "At noon."]


def test_a_chat_that_telegram_exported_as_a_page_is_its_messages() -> None:
    def message(who: str, said: str, around: str = "body") -> str:
        name = f'<div class="from_name">\n{who}\n</div>' if who else ""
        return (
            '<div class="message default clearfix" id="message5"><div class="pull_left userpic_wrap">'
            '<div class="initials">A</div></div>'
            '<div class="body"><div class="pull_right date details">10:02</div>'
            f'<div class="{around}">{name}<div class="media_wrap"><div class="title">Photo</div></div>'
            f'<div class="text">\n{said}\n</div></div></div></div>'
        )

    day = '<div class="message service"><div class="body details">12 March 2024</div></div>'
    page = (
        f"<html><title>Chat</title>{day}{message('Ann', 'Did it <b>rain</b>?<br>Here not.')}"
        f"{message('', 'Or?')}{message('News', 'By others', 'forwarded body')}{day}{message('Bo', 'Yes')}"
    )
    lines = _texts(".html", page)[0].split("\n")
    assert list(filter(None, lines)) == ["Ann: Did it rain?", "Here not.", "Or?", "Bo: Yes"]


def test_a_page_is_decoded_by_the_charset_that_it_names() -> None:
    for head in ('<meta charset="windows-1252">', '<?xml version="1.0" encoding="latin1"?>'):
        assert _texts(".html", f"{head}<p>Café – là</p>".encode("cp1252")) == ["Café – là"]
    old = '<META http-equiv="Content-Type" content="text/html; charset=koi8-r"><p>Сад</p>'
    assert _texts(".html", old.encode("koi8_r")) == ["Сад"]


def test_what_a_browser_does_not_show_as_text_is_left_out() -> None:
    hidden = "<svg><text>a</text></svg><select><option>b</select><noscript>Turn on c</noscript><textarea>d"
    page = f"<p>Plums{hidden}</textarea><video>No e</video><iframe src=x></iframe> and <i/>peas</p>"
    assert _texts(".html", page) == ["Plums and peas"]


def test_a_mail_of_apple_is_read_without_its_properties() -> None:
    mail = f"{HEAD}\nOne mail.\n"
    assert _texts(".emlx", f"{len(mail):<10}\n{mail}<?xml version='1.0'?><plist/>") == ["One mail."]


def test_a_table_is_its_cells_line_by_line() -> None:
    rows = 'day;note\n1.5.;"Sowed; then\nrain"\n\n2.5.;Hoed\n'
    assert _texts(".csv", b"day,note\r1.5.,Sowed\r") == ["day\tnote\n1.5.\tSowed"]
    assert _texts(".csv", rows.encode("utf-16")) == ["day\tnote\n1.5.\tSowed; then\nrain\n2.5.\tHoed"]


def test_rtf_is_its_text_in_its_own_charset() -> None:
    assert _texts(".rtf", rb"{\rtf1\ansi\ansicpg1252 {\b Gr\'fc\'dfe}\par aus dem Garten \u8211?}") == [
        "Grüße\naus dem Garten –"
    ]
    assert _texts(".rtf", "Plain text under this name.") == ["Plain text under this name."]
