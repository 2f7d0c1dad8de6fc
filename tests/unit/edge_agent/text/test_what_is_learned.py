"""Tests that a vault, a mailbox and exported chats of hundreds of messages teach what people wrote, only."""

import json
import re
from collections import Counter
from email.message import EmailMessage
from pathlib import Path

import numpy as np

from permille_agent.text.documents import Conversation, PlainText
from permille_agent.text.preparation import prepare
from permille_agent.text.reading import read_documents, survey
from permille_agent.text.tokens import TextTokenizer

MODEL = Path(__file__).parents[4] / "examples" / "model"
TEMPLATE = b"{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"

WORDS = ["sowed", "hoed", "watered", "picked", "dug", "pruned", "raked", "tied"]
PLANTS = ["peas", "beans", "kale", "leeks", "plums", "quinces", "chard", "onions", "garlic"]


def _said(number: int) -> str:
    return f"We {WORDS[number % 8]} the {PLANTS[number % 9]} in bed {number}."


def _vault(root: Path, count: int) -> list[str]:
    (root / ".obsidian").mkdir(parents=True)
    (root / ".obsidian" / "app.json").write_text('{"theme": "dark"}')
    (root / "daily").mkdir()
    for number in range(count):
        front = f"---\ntags:\n  - garden\ndate: 2024-05-{number % 28 + 1:02}\naliases: [day {number}]\n---\n"
        links = f"See [[2024-05-01|the first day]] and [the shop](https://example.org/{number}).\n"
        (root / "daily" / f"2024-05-{number:03}.md").write_text(
            f"{front}{_said(number)}\n\n![[Pasted image {number}.png]]\n\n{links} ^block{number}\n"
        )
    (root / "Pasted image 1.png").write_bytes(b"\x89PNG")
    return [f"{_said(number)}\n\n\n\nSee the first day and the shop." for number in range(count)]


def _mailbox(path: Path, count: int) -> list[str]:
    charsets = ("utf-8", "iso-8859-1", "koi8-r")
    box = b""
    for number in range(count):
        mail = EmailMessage()
        mail["From"], mail["Subject"] = "Ärne <a@example.org>", "Grüße aus dem Garten"
        mail["Date"] = "Mon, 01 Jan 2024 10:00:00 +0000"
        above = f"On Mon, Jan 1, 2024 at 10:0{number % 10}, Jo <jo@example.org> wrote:"
        quoted = f"{above}\n> {_said(number + 7)}\n> Jo\n"
        mail.set_content(f"From here: {_said(number)}\n\n{quoted}", charset=charsets[number % 3])
        if number % 4 == 0:
            mail.add_alternative(
                f"<p>From here: {_said(number)}</p><blockquote>no</blockquote>", subtype="html"
            )
        if number % 5 == 0:
            mail.add_attachment(b"\0\1", maintype="image", subtype="png", filename="bed.png")
        quoted_lines = mail.as_bytes().replace(b"\nFrom here", b"\n>From here")
        box += b"From a@example.org Mon Jan  1 10:00:00 2024\n" + quoted_lines + b"\n"
    path.write_bytes(box)
    return [f"From here: {_said(number)}" for number in range(count)]


def _whatsapp(path: Path, count: int) -> str:
    lines = ["\u200e[01/05/2024, 08:00:00] Bed 7: \u200eMessages and calls are end-to-end encrypted."]
    for number in range(count):
        at = f"[{number // 20 + 1:02}/05/2024, 10:{number % 60:02}:11]"
        lines.append(f"{at} {'Marta' if number % 2 else 'Jo'}: {_said(number)}")
        if number % 3 == 0:
            lines.append(f"\u200e{at} Jo: \u200eimage omitted")
    path.write_text("\n".join(lines))
    days = [range(start, min(start + 20, count)) for start in range(0, count, 20)]
    return "\n\n".join("\n".join(f"{'Marta' if n % 2 else 'Jo'}: {_said(n)}" for n in day) for day in days)


def _chatgpt(path: Path, count: int) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    exported, expected = [], []
    for number in range(count):
        asked, answer = f"What about bed {number}?", _said(number)
        spoken = [{"content_type": "audio_transcription", "text": asked}, {"audio_asset_pointer": {}}]
        turns = [
            None,
            {"role": "user", "parts": spoken if number % 2 else [asked]},
            {"role": "assistant", "parts": [f"{answer}\ue200cite\ue202turn0\ue201"]},
        ]
        mapping = {}
        for place, turn in enumerate(turns):
            kind = "multimodal_text" if turn and not isinstance(turn["parts"][0], str) else "text"
            content = turn and {"content_type": kind, "parts": turn["parts"]}
            message = turn and {"author": {"role": turn["role"]}, "content": content, "create_time": place}
            mapping[str(place)] = {"message": message, "parent": str(place - 1) if place else None}
        tree = {"id": f"c{number}", "title": "Bed", "create_time": 1714550000, "mapping": mapping}
        exported.append(tree | ({"current_node": "2"} if number % 3 else {}))
        expected.append((("user", asked), ("assistant", answer)))
    path.write_text(json.dumps(exported))
    return expected


def test_the_tokens_that_train_are_what_people_wrote(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    _vault(root / "vault", 120)
    _mailbox(root / "sent.mbox", 150)
    _whatsapp(root / "_chat.txt", 300)
    _chatgpt(root / "conversations.json", 100)
    documents, report = read_documents([root])

    def read(name: str) -> bytes | None:
        if name == "chat_template.jinja":
            return TEMPLATE
        return (MODEL / name).read_bytes() if (MODEL / name).exists() else None

    tokenizer = TextTokenizer(read)
    prepared = prepare(documents, tokenizer, row_tokens=96, report=report)
    rows = [*prepared.train, *prepared.select, *prepared.test]
    shown = "".join(tokenizer.decode(row.ids_T.tolist()) for row in rows)
    learned = "".join(tokenizer.decode(row.ids_T[np.array(row.target_T)].tolist()) for row in rows)
    tokenizer.close()

    assert report.bad_rows == {}
    said = Counter(_said(number) for count in (120, 150, 300, 100) for number in range(count))
    found = Counter(re.findall(r"We \w+ the \w+ in bed \d+\.", shown))
    # Training leaves out the tokens beside a block that judges.
    assert not found - said and (said - found).total() < 10
    assert "What about bed" in shown and "What about bed" not in learned
    told = (
        "2024",
        "---",
        "garden",
        "aliases",
        "http",
        "Pasted",
        "omitted",
        "encrypted",
        "wrote:",
        "cite",
        "<p>",
    )
    assert not [word for word in told if word in shown]


def test_what_is_read_is_what_people_wrote(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    notes = _vault(root / "vault", 120)
    mails = _mailbox(root / "sent.mbox", 150)
    chat = _whatsapp(root / "_chat.txt", 300)
    talks = _chatgpt(root / "conversations.json", 100)

    documents, report = survey([root])

    texts = [one.content.text for one in documents if isinstance(one.content, PlainText)]
    assert sorted(text for text in texts if text.startswith("We ")) == sorted(notes)
    assert sorted(text for text in texts if text.startswith("From here")) == sorted(mails)
    blocks = [text for text in texts if text.startswith(("Jo", "Marta"))]
    assert "\n\n".join(blocks) == chat
    assert len(blocks) + len(notes) + len(mails) == len(texts)
    assert [one.content.messages for one in documents if isinstance(one.content, Conversation)] == talks
    assert (report.read, report.bad_rows.total()) == (120 + 150 + 1 + 100, 0)
    assert report.left_out == {"front matter": 120, "notice or placeholder of a chat": 101}
    assert report.ignored == {"hidden": 1, ".png": 1}
