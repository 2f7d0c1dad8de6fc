"""Texts of the reference model: what is read, what is dropped and counted, what the streams hold."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

from permille.errors import InputError
from permille_lab.reference.grams import Forbidden, Seen, word_ids
from permille_lab.reference.prepare import pieces, prepare
from permille_lab.reference.sources import Source, SourceList, read_sources
from permille_lab.reference.texts import documents
from permille_lab.reference.tokenizer import read_tokenizer
from permille_lab.reference.unseen import unseen_texts

WORDS = [
    f"{a}{b}" for a in ("stone", "river", "light", "garden", "winter") for b in ("s", "ed", "ing", "er", "y")
]


def prose(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


PLANTED = "the quick brown fox jumps over one lazy dog while seven cats watch from a wall"


def source(name: str, fmt: str = "text", **more: object) -> Source:
    fields: dict[str, object] = {"group": "plain", "files": ("*.txt",), "licence": "CC0", **more}
    return Source(name=name, format=fmt, **fields)  # type: ignore[arg-type]


def corpus(tmp_path: Path, texts: dict[str, str]) -> tuple[SourceList, Path]:
    data = tmp_path / "data"
    (data / "tasks").mkdir(parents=True)
    (data / "tasks/test.jsonl").write_text(json.dumps({"a": [PLANTED], "label": 1}) + "\n{broken line\n")
    for name, text in texts.items():
        (data / f"{name}.txt").write_text(text)
    listed = SourceList(
        sources=(source("plain"),), mixture={"plain": 1.0}, forbidden={"tasks": ("tasks/*.jsonl",)}
    )
    return listed, data


def test_a_planted_run_of_thirteen_words_drops_its_document_and_is_counted(tmp_path: Path) -> None:
    thirteen = " ".join(PLANTED.upper().split()[2:15])
    twelve = " ".join(PLANTED.split()[2:14])
    texts = {
        "clean": prose(1, 900),
        "planted": prose(2, 100) + ", " + thirteen + "! " + prose(3, 100),
        "nearly": prose(4, 100) + " " + twelve + " " + prose(5, 100),
        "short": "too short",
        "twice": prose(1, 900),
    }
    listed, data = corpus(tmp_path, texts)
    manifest = prepare(listed, tmp_path, data, tmp_path / "out", 300)
    described = manifest["sources"][0]
    assert described["pieces"] == {
        "kept": 2,
        "read": 5,
        "repeated": 1,
        "shares 13 words with tasks": 1,
        "too short": 1,
    }
    assert manifest["forbidden_runs"] == {"tasks": 4}
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == manifest


def test_the_manifest_names_each_file_and_its_licence(tmp_path: Path) -> None:
    listed, data = corpus(tmp_path, {"one": prose(1, 200), "two": prose(2, 200)})
    described = prepare(listed, tmp_path, data, tmp_path / "out", 300)["sources"][0]
    listing = (tmp_path / "out/files/plain.sha256").read_text()
    assert listing.splitlines() == [
        f"{hashlib.sha256((data / name).read_bytes()).hexdigest()}  {name}" for name in ("one.txt", "two.txt")
    ]
    assert described["sha256_of_file_list"] == hashlib.sha256(listing.encode()).hexdigest()
    assert (described["licence"], described["files"], described["origin"]) == ("CC0", 2, "data folder")


def test_a_models_tokenizer_gives_the_streams_that_it_was_trained_on(tmp_path: Path) -> None:
    listed, data = corpus(tmp_path, {"one": prose(1, 200), "two": "A fog of " + prose(2, 200)})
    of_more_text = prepare(listed, tmp_path, data, tmp_path / "first", 300)
    first = read_tokenizer(tmp_path / "first/tokenizer")
    (data / "two.txt").unlink()
    for name, known in (("own", None), ("known", first)):
        prepare(listed, tmp_path, data, tmp_path / name, 290, known)
    files = [tmp_path / name / "tokenizer/tokenizer.json" for name in ("first", "known", "own")]
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    (data / "two.txt").write_text("A fog of " + prose(2, 200))
    assert prepare(listed, tmp_path, data, tmp_path / "known", 290, first) == of_more_text
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path)
    known = json.loads((tmp_path / "first/tokenizer/tokenizer.json").read_text())
    known["added_tokens"], known["model"] = (
        [],
        {"type": "BPE", "vocab": {"a": 0, "b": 1, "<s>": 2}, "merges": []},
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(InputError, match=r"got \('a', 'b', '<s>'\) of 3"):
        read_tokenizer(tmp_path)


def test_streams_decode_to_the_pieces_behind_a_start(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = prose(1, 200) + " naïve – 1984\u2028€"
    listed, data = corpus(tmp_path, {"one": text})
    prepare(listed, tmp_path, data, tmp_path / "out", 300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/tokenizer")
    both = [np.load(tmp_path / "out" / name) for name in ("plain.npy", "validation.npy")]
    stream = np.concatenate(both)
    assert stream.dtype == np.uint16
    assert stream[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(stream[1:].tolist()) == "\n".join(text.splitlines())


def test_a_forbidden_sentence_of_eight_words_is_matched_whole() -> None:
    forbidden = Forbidden(
        ["A gorgeous , witty and quietly moving little film .", "seven words are far too few here"]
    )
    assert forbidden.touches(word_ids("he called it a gorgeous witty and quietly moving little film indeed"))
    assert not forbidden.touches(word_ids("a gorgeous witty and quietly moving little play indeed it was"))
    assert not forbidden.touches(word_ids("he said seven words are far too few here and left the room"))


def test_a_document_mostly_seen_before_is_repeated() -> None:
    seen = Seen()
    assert not seen.repeated(word_ids(prose(1, 600)))
    assert seen.repeated(word_ids(prose(1, 600) + " " + prose(2, 100)))
    assert not seen.repeated(word_ids(prose(3, 600)))


def test_pieces_break_at_lines_and_lose_nothing() -> None:
    text = "\n".join(prose(seed, 100) for seed in range(30))
    cut = list(pieces(text))
    assert "\n".join(cut) == text
    assert max(map(len, cut)) <= 6000


def test_an_empty_list_of_unseen_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found none"):
        list(unseen_texts(tmp_path, ["tasks/*.jsonl"]))


def test_only_the_last_lines_are_unseen_where_the_pattern_says_so(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"document {number}"}) for number in range(5)]
    (tmp_path / "c4.jsonl").write_text("\n".join(rows))
    assert list(unseen_texts(tmp_path, ["c4.jsonl#last2"])) == ["document 3", "document 4"]


@pytest.mark.parametrize(
    ("fmt", "text", "expected"),
    [
        ("jsonl", '{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        ("stories", "one<|endoftext|>two", ["one", "two"]),
        ("reviews", "about\n[t]x\nzoom[+2]##It zooms .\n##Well .", ["It zooms . Well ."]),
        (
            "wikitext",
            " = A = \n\n text \n = = Part = = \n\n = B = \n more",
            [" = A = \n\n text \n = = Part = = \n\n", " = B = \n more"],
        ),
        (
            "markdown",
            "---\nt: x\n---\n# Head\n\nA *b* [c](d) ![e](f) g_h\ni.\n\n1 2\n",
            ["Head\nA b c g_h i."],
        ),
        (
            "cnxml",
            "<document xmlns='u'><metadata><para>not this one at all</para></metadata><content>"
            "<para>The area <term>really</term> is <m:math xmlns:m='v'><m:mi>x</m:mi></m:math> wide.</para>"
            "<exercise><para>and not this question either</para></exercise></content></document>",
            ["The area really is wide."],
        ),
    ],
)
def test_each_format_yields_plain_documents(tmp_path: Path, fmt: str, text: str, expected: list[str]) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert list(documents(source("any", fmt), path)) == expected


def test_a_required_line_selects_documents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("story\n* License: [CC-BY-NC]\n")
    assert list(documents(source("any", require="License: [CC-BY]\n"), path)) == []


def test_the_shipped_list_is_whole() -> None:
    listed = read_sources()
    assert abs(sum(listed.mixture.values()) - 1) < 1e-9
    assert set(listed.forbidden) == {"tasks", "users", "held-out"}
    assert all(len(entry.commit or "") == 40 for entry in listed.sources if entry.origin)
    assert len({entry.name for entry in listed.sources}) == len(listed.sources)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('name = "a"\ngroup = "plain"\nfiles = []\nformat = "pdf"\nlicence = "x"', "expected a format"),
        ('name = "a"\ngroup = "plain"\nfiles = []\nformat = "text"', "licence"),
        ('name = "a"\ngroup = "other"\nfiles = []\nformat = "text"\nlicence = "x"', "share for group"),
        ('name = "a"\ngroup = "plain"\nfiles = []\nformat = "text"\nlicence = "x"\norigin = "y"', "together"),
    ],
)
def test_a_source_that_lacks_something_is_refused(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "sources.toml"
    path.write_text(f"[mixture]\nplain = 1.0\n[forbidden]\ntasks = []\n[[source]]\n{row}\n")
    with pytest.raises(InputError, match=message):
        read_sources(path)
