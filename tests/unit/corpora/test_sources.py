"""Tests of texts from files and streams: every row is used or counted."""

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from permille.choices import StreamedDataset
from permille.corpora import sources
from permille.corpora.sources import BadRow, ReadReport, check_head, file_texts
from permille.corpora.streams import streamed_texts
from permille.errors import InputError, RetryableError


def read(root: Path, name: str, content: bytes) -> tuple[list[str], ReadReport]:
    (root / name).write_bytes(content)
    report = ReadReport()
    return list(file_texts(root / name, report)), report


def rows(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_jsonl_gives_the_text_field_of_each_row(tmp_path: Path, name: str) -> None:
    content = rows("one", "zwei ü", "三")[:-1]
    texts, report = read(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)
    assert texts == ["one", "zwei ü", "三"]
    assert report.as_json() == {"rows": 3, "bad": {}}


def test_bad_rows_are_counted_by_reason_with_their_numbers(tmp_path: Path) -> None:
    lines = [b'{"text": "good"}', b"not json", b'{"text": 3}', b'{"other": "x"}', b"[1]"]
    lines += [
        b'{"text": "  \\n"}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"",
        b'{"text": "also good"}',
    ]
    content = b"\n".join(lines)
    texts, report = read(tmp_path, "a.jsonl", content + b"\n" + rows(*["good"] * 60))
    assert texts == ["good", "also good", *["good"] * 60]
    assert report.as_json() == {
        "rows": 70,
        "bad": {
            "empty": {"count": 2, "first_rows": [6, 9]},
            "no-text-field": {"count": 3, "first_rows": [3, 4, 5]},
            "not-json": {"count": 1, "first_rows": [2]},
            "not-utf8": {"count": 2, "first_rows": [7, 8]},
        },
    }
    assert report.rows == len(texts) + report.bad.total()


@pytest.mark.parametrize(("broken", "refused"), [(10, False), (11, True)])
def test_a_corpus_of_which_more_than_a_tenth_is_broken_is_refused(
    tmp_path: Path, broken: int, refused: bool
) -> None:
    content = rows(*["good"] * (100 - broken)) + b"\n" * 50 + b"broken\n" * broken
    if refused:
        with pytest.raises(
            InputError, match=r"10 of 99 rows are broken, more than 10%: .*10 not-json \(first in"
        ):
            read(tmp_path, "a.jsonl", content)
    else:
        assert len(read(tmp_path, "a.jsonl", content)[0]) == 90


def test_a_broken_corpus_is_refused_long_before_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"broken\n" * 100_000)
    report = ReadReport()
    with pytest.raises(InputError, match="100 of 100 rows are broken"):
        list(file_texts(tmp_path / "a.jsonl", report))
    assert report.rows == 100


@pytest.mark.parametrize("kept", [1, 8, 15])
def test_a_file_that_ends_in_the_middle_of_a_row_is_refused(tmp_path: Path, kept: int) -> None:
    whole = rows(*["a text"] * 50)
    with pytest.raises(InputError, match="is cut in its middle"):
        read(tmp_path, "a.jsonl", whole + whole[:kept])


def test_a_row_above_the_limit_is_counted_and_never_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LARGEST_ROW", 64)
    content = rows("short") + rows("x" * 1000) + rows("again") + rows("y" * 50) + rows("z" * 500)
    texts, report = read(tmp_path, "a.jsonl", content + rows(*["good"] * 15))
    assert texts == ["short", "again", "y" * 50, *["good"] * 15]
    assert report.bad == {BadRow.TOO_LONG: 2}
    assert report.examples == {BadRow.TOO_LONG: [2, 5]}


def test_plain_text_is_cut_at_blank_lines_and_loses_no_character(tmp_path: Path) -> None:
    content = "\n\n".join(f"paragraph {i} " + "word " * 200 for i in range(20)) + "\n"
    texts, report = read(tmp_path, "a.txt", content.encode())
    assert "".join(texts) == content
    assert len(texts) > 3
    assert all(len(text) >= sources.TEXT_CHARACTERS and text.endswith("\n\n") for text in texts[:-1])
    assert (report.rows, report.bad.total()) == (len(texts), 0)


def test_plain_text_counts_lines_that_are_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TEXT_CHARACTERS", 4)
    texts, report = read(tmp_path, "a.txt", b"good\n\xff\xfe\nstill good\n\n" + b"good\n\n" * 9)
    assert texts == ["good\nstill good\n\n", *["good\n\n"] * 9]
    assert report.bad == {BadRow.NOT_UTF8: 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    content = BOM_UTF8 + (b"one\n" if name == "a.txt" else rows("one"))
    texts, report = read(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)
    assert ([text.strip() for text in texts], report.bad.total()) == (["one"], 0)
    check_head(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_plain_text_in_utf_16_is_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(("a line of a story\r\n\r\n" * 1000).encode(encoding))
    for check in (check_head, lambda path: list(file_texts(path, ReadReport()))):
        with pytest.raises(InputError, match="not-utf8"):
            check(tmp_path / "a.txt")


def test_rows_end_for_the_check_as_for_a_job(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows("one", "two").replace(b"\n", b"\r"))
    (tmp_path / "b.jsonl").write_bytes(b'{"text":\r"one"}\n')
    with pytest.raises(InputError, match="not-json"):
        check_head(tmp_path / "a.jsonl")
    check_head(tmp_path / "b.jsonl")
    assert list(file_texts(tmp_path / "b.jsonl", ReadReport())) == ["one"]


def test_a_huge_paragraph_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST_ROW", 100)
    texts, _ = read(tmp_path, "a.txt", b"word word\n" * 50)
    assert "".join(texts) == "word word\n" * 50
    assert max(map(len, texts)) <= 110
    for content in (b"", b"\n\n \n"):
        assert read(tmp_path, "a.txt", content)[0] == []


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(rows(*(str(i) * 50 for i in range(500))))
    for content in (whole[:-20], b"no gzip at all", whole[:100] + b"\x00" * 50 + whole[150:]):
        with pytest.raises(InputError, match=r"a\.jsonl\.gz"):
            read(tmp_path, "a.jsonl.gz", content)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl.zst", "a", "a.txt.gz"])
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"\.jsonl, \.jsonl\.gz or \.txt"):
        read(tmp_path, name, b"x")


def test_reading_stops_where_the_caller_does(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows("one", "two") + b"broken\n")
    report = ReadReport()
    texts = file_texts(tmp_path / "a.jsonl", report)
    assert next(texts) == "one"
    assert report.rows == 1


COMMIT = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"


def write_mirror(root: Path) -> None:
    """Write a few rows in the layout of allenai/c4."""
    (root / "en").mkdir(parents=True)
    names = [f"  - split: {split}\n    path: en/c4-{split}.*.json.gz" for split in ("train", "validation")]
    lines = ["---", "configs:", "- config_name: en", "  data_files:", *names, "---", ""]
    (root / "README.md").write_text("\n".join(lines))
    for split, number in (("train", 2), ("validation", 1)):
        for index in range(number):
            texts = [f"{split} {index} one", " ", f"{split} {index} two"]
            found = [
                json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "u"}) for text in texts
            ]
            path = root / "en" / f"c4-{split}.{index:05d}-of-{number:05d}.json.gz"
            path.write_bytes(gzip.compress("\n".join([*found, ""]).encode()))


def test_c4_is_streamed_shard_by_shard_at_its_pinned_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mirror(tmp_path)
    load, hub = datasets.load_dataset, f"hf://datasets/allenai/c4@{COMMIT}/"

    def from_mirror(form: str, *, data_files: dict[str, str], **options: Any) -> Any:
        assert all(url.startswith(hub) for url in data_files.values())
        files = {split: url.replace(hub, f"{tmp_path}/") for split, url in data_files.items()}
        return load(form, data_files=files, **options)

    monkeypatch.setattr(datasets, "load_dataset", from_mirror)
    report = ReadReport()
    texts = streamed_texts(StreamedDataset.C4, "train", report)
    assert list(texts) == ["train 0 one", "train 0 two", "train 1 one", "train 1 two"]
    assert report.as_json() == {"rows": 6, "bad": {"empty": {"count": 2, "first_rows": [2, 5]}}}
    assert next(streamed_texts(StreamedDataset.C4, "validation", ReadReport())) == "validation 0 one"


@pytest.mark.parametrize("folder", ["allenai/c4", f"hf:/datasets/allenai/c4@{COMMIT}", "json"])
def test_a_folder_of_the_same_name_is_not_taken_for_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """The tests run without the hub, so a text could only come from the folder."""
    write_mirror(tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RetryableError, match=r"Cannot reach the hub for c4.* add NAME --file"):
        next(streamed_texts(StreamedDataset.C4, "train", ReadReport()))


@pytest.mark.parametrize(
    "failure", [EOFError("the stream ended"), zlib.error("invalid block"), ValueError("Expecting value")]
)
def test_a_stream_that_cannot_be_read_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def broken(*_: Any, **__: Any) -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise failure

    monkeypatch.setattr(datasets, "load_dataset", broken)
    texts = streamed_texts(StreamedDataset.C4, "train", ReadReport())
    assert next(texts) == "one"
    with pytest.raises(RetryableError, match=rf"for c4.*{failure}.*add NAME --file"):
        next(texts)


def test_the_hub_says_when_a_stream_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(*_: Any, **__: Any) -> Any:
        answer = OSError("too many")
        vars(answer)["response"] = SimpleNamespace(status_code=429, headers={"retry-after": "196"})
        raise ConnectionError("cannot reach allenai/c4") from answer

    monkeypatch.setattr(datasets, "load_dataset", limited)
    with pytest.raises(RetryableError, match="limits the rate of requests") as refused:
        list(streamed_texts(StreamedDataset.C4, "train", ReadReport()))
    assert refused.value.retry_after_s == 196
