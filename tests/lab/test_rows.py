"""Tests of reading task files: forms of the releases, meanings of labels, and rows that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from permille.errors import InputError
from permille_lab.tasks import rows
from permille_lab.tasks.examples import Task, majority_share
from permille_lab.tasks.rows import read_file

ROWS: dict[Task, dict[str, Any]] = {
    Task.RTE: {"premise": "A cat sat.", "hypothesis": "A cat slept.", "label": "not_entailment"},
    Task.BOOLQ: {"passage": "Tea is a drink.", "question": "is tea a drink", "label": True},
    Task.WSC: {
        "text": "Ann told Eve that she won.",
        "target": {"span1_text": "Ann", "span2_text": "she"},
        "label": False,
    },
    Task.COPA: {
        "premise": "I fell.",
        "choice1": "The floor was wet.",
        "choice2": "I sang.",
        "question": "cause",
        "label": 0,
    },
    Task.MRPC: {"sentence1": "A cat sat. ", "sentence2": "A cat was seated.", "label": "equivalent"},
    Task.QQP: {"question1": "Is it late?", "question2": "Who is it?", "label": 0},
    Task.QNLI: {"question": "Who sat?", "sentence": "A cat sat.", "label": "entailment"},
    Task.WNLI: {"sentence1": "Ann told Eve that she won.", "sentence2": "Eve won.", "label": 0},
    Task.CHOICE: {"prompt": "It is", "candidates": [" warm", " cold"], "label": 1},
}
# Prompt and labelled candidate of each row above.
WORDED = {
    Task.RTE: ('A cat sat.\nDoes this mean that "A cat slept." is true? Yes or No?\n', "No"),
    Task.BOOLQ: ("Tea is a drink. is tea a drink?\n", "Yes"),
    Task.WSC: (
        "Ann told Eve that she won.\n"
        'In the previous sentence, does the pronoun "she" refer to Ann? Yes or No?\n',
        "No",
    ),
    Task.COPA: ("I fell because", " the floor was wet."),
    Task.MRPC: (
        "Do the following two sentences mean the same thing? Yes or No?\n"
        "Sentence 1: A cat sat.\nSentence 2: A cat was seated.\n",
        "Yes",
    ),
    Task.QQP: (
        "Are these two questions asking the same thing? Yes or No?\n"
        "Question 1: Is it late?\nQuestion 2: Who is it?\n",
        "No",
    ),
    Task.QNLI: (
        "Does this sentence answer the question? Yes or No?\nSentence 1: Who sat?\nSentence 2: A cat sat.\n",
        "Yes",
    ),
    Task.WNLI: (
        "Given the first sentence, is the second sentence true? Yes or No?\n"
        "Sentence 1: Ann told Eve that she won.\nSentence 2: Eve won.\n",
        "No",
    ),
    Task.CHOICE: ("It is", " cold"),
}


def written(folder: Path, *rows: object, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("task", ROWS)
def test_a_row_becomes_the_prompt_and_the_right_candidate(task: Task, tmp_path: Path) -> None:
    pool = read_file(task, written(tmp_path, ROWS[task]))
    (example,) = pool.examples
    assert (example.prompt, example.candidates[example.label]) == WORDED[task]
    assert example.name == "rows.jsonl:1"
    assert not pool.bad


def test_labels_name_other_candidates(tmp_path: Path) -> None:
    path = written(tmp_path, *(ROWS[Task.BOOLQ] | {"label": value} for value in (False, True)))
    assert [e.candidates[e.label] for e in read_file(Task.BOOLQ, path).examples] == ["No", "Yes"]


def test_a_task_of_ones_own_names_its_candidates(tmp_path: Path) -> None:
    row = {"prompt": "Is it warm?", "candidates": [" Yes", " No", " Perhaps"], "label": 2}
    path = written(tmp_path, row, row | {"group": "a", "label": 0})
    first, second = read_file(Task.CHOICE, path).examples
    assert (first.prompt, first.candidates[first.label]) == ("Is it warm?", " Perhaps")
    assert (first.group, second.group) == ("is it warm?", "a")
    assert not first.document


@pytest.mark.parametrize("header", ["sentence\tlabel\n", ""])
def test_sst2_is_read_with_and_without_a_header(header: str, tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text(header + "a fine film \t1\ndull\t0\n")
    found = [(e.prompt, e.candidates[e.label]) for e in read_file(Task.SST2, path).examples]
    assert found == [("a fine film It was", " great"), ("dull It was", " terrible")]


@pytest.mark.parametrize(
    ("task", "table"),
    [
        (
            Task.MRPC,
            "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tA cat sat.\tA cat was seated.\n",
        ),
        (
            Task.QQP,
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n3\t5\t6\tIs it late?\tWho is it?\t0\n",
        ),
        (Task.QNLI, "index\tquestion\tsentence\tlabel\n0\tWho sat?\tA cat sat.\tentailment\r\n"),
        (Task.WNLI, "index\tsentence1\tsentence2\tlabel\n0\tAnn told Eve that she won.\tEve won.\t0\n"),
    ],
)
def test_tables_of_glue_are_read_by_their_headers(task: Task, table: str, tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text(table)
    (example,) = read_file(task, path).examples
    assert (example.prompt, example.candidates[example.label]) == WORDED[task]
    path.write_text(table.partition("\n")[2])
    with pytest.raises(InputError, match=r"cells"):
        read_file(task, path)


def test_a_row_that_is_not_utf_8_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes(b"a fine film\t1\n" * 30 + b"caf\xe9\t0\n")
    (bad,) = read_file(Task.SST2, path).bad
    assert bad.name == "train.tsv:31"
    assert "UTF-8" in bad.reason


def test_documents_are_read_as_an_agent_reads_them(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"group": "Ann", "text": "Good morning."},
        {"group": "Ann", "prompt": "Hello.\n", "completion": "Hi!", "text": None},
        {"group": "ann", "text": "Another."},
        {"group": None, "prompt": "", "completion": "Alone. "},
        {"text": "alone."},
    )
    examples = read_file(Task.TEXT, path).examples
    assert [(e.prompt, e.candidates) for e in examples] == [
        ("", ("Good morning.",)),
        ("Hello.\n", ("Hi!",)),
        ("", ("Another.",)),
        ("", ("Alone. ",)),
        ("", ("alone.",)),
    ]
    assert [e.group for e in examples] == ["Ann", "Ann", "ann", "alone.", "alone."]
    assert all(example.document for example in examples)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a", "prompt": "b", "completion": "c"}, "expected either 'text' or"),
        ({"sentence": "a"}, "expected either 'text' or"),
        ({"completion": "a"}, r"got ['completion']"),
        ({"text": "a", "prompt": "b"}, r"got ['prompt', 'text']"),
        ({"text": "a", "prompt": 3}, r"got ['prompt', 'text']"),
        ({"prompt": 3, "completion": "b"}, "expected text in 'prompt'"),
        ({"text": "hi \ud83d"}, "lone surrogate"),
        ({"text": "hi", "group": "\ud83d"}, "lone surrogate"),
        ({"prompt": "a", "completion": " "}, "expected text in 'completion'"),
        ({"text": 3}, "expected text in 'text'"),
        ({"text": "a", "group": 7}, "expected text in 'group'"),
    ],
)
def test_a_row_that_is_no_document_is_reported(row: object, reason: str, tmp_path: Path) -> None:
    good = [{"text": f"number {number}"} for number in range(20)]
    pool = read_file(Task.TEXT, written(tmp_path, *good, row))
    assert len(pool.examples) == 20
    assert [bad.name for bad in pool.bad] == ["rows.jsonl:21"]
    assert reason in pool.bad[0].reason


@pytest.mark.parametrize(
    ("task", "change", "reason"),
    [
        (Task.RTE, {"label": "maybe"}, "expected 'label' of"),
        (Task.RTE, {"label": None}, "expected 'label' of"),
        (Task.BOOLQ, {"label": 1}, "expected 'label' of"),
        (Task.COPA, {"label": True}, "expected 'label' of"),
        (Task.COPA, {"question": "why"}, "'cause' or 'effect'"),
        (Task.RTE, {"premise": "  "}, "expected text in 'premise'"),
        (Task.RTE, {"premise": 3}, "expected text in 'premise'"),
        (Task.WSC, {"target": {"span1_text": "Ann"}}, "span2_text"),
        (Task.CHOICE, {"candidates": ["a", "a"]}, "each once"),
        (Task.CHOICE, {"candidates": ["a"]}, "two texts or more"),
        (Task.CHOICE, {"label": 3}, "label from 0 to 1"),
        (Task.CHOICE, {"label": True}, "label from 0 to 1"),
        (Task.RTE, {"premise": "hi \ud83d"}, "lone surrogate"),
    ],
)
def test_a_bad_row_is_reported_and_the_others_kept(
    task: Task, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    pool = read_file(task, written(tmp_path, *[ROWS[task]] * 19, ROWS[task] | change))
    assert len(pool.examples) == 19
    (bad,) = pool.bad
    assert bad.name == "rows.jsonl:20"
    assert reason in bad.reason


def test_a_broken_line_is_reported(tmp_path: Path) -> None:
    path = written(tmp_path, *[ROWS[Task.RTE]] * 40)
    with path.open("ab") as file:
        file.write(b'{"premise": "cut\n[1]\n')
    names = [bad.name for bad in read_file(Task.RTE, path).bad]
    assert names == ["rows.jsonl:41", "rows.jsonl:42"]


def test_a_file_without_labels_or_of_another_task_is_refused(tmp_path: Path) -> None:
    unlabelled = {key: value for key, value in ROWS[Task.RTE].items() if key != "label"}
    with pytest.raises(InputError, match=r"rows of rte in rows.jsonl, got 0 and 3 bad ones"):
        read_file(Task.RTE, written(tmp_path, *[unlabelled] * 3))
    with pytest.raises(InputError, match="passage"):
        read_file(Task.BOOLQ, written(tmp_path, ROWS[Task.RTE]))
    with pytest.raises(InputError, match="expected a file"):
        read_file(Task.RTE, tmp_path / "absent.jsonl")


def test_the_majority_is_counted_by_label(tmp_path: Path) -> None:
    rows = [ROWS[Task.COPA] | {"label": label, "choice1": f"It {n}."} for n, label in enumerate((0, 0, 1))]
    assert majority_share(read_file(Task.COPA, written(tmp_path, *rows)).examples) == pytest.approx(2 / 3)


def test_a_line_that_is_too_long_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 40)
    table = tmp_path / "sst.tsv"
    good = [f"a fine film {number}\t1\n" for number in range(40)]
    table.write_text("\ufeffsentence\tlabel\n" + "".join(good) + "x" * 90 + "\t1\n" + "the last one\t0\n")
    found = read_file(Task.SST2, table)
    assert [bad.name for bad in found.bad] == ["sst.tsv:42"]
    assert "at most 40 bytes" in found.bad[0].reason
    assert [example.name for example in found.examples][-2:] == ["sst.tsv:41", "sst.tsv:43"]
    lines = tmp_path / "text.jsonl"
    texts = [*(f"words {number}" for number in range(40)), "y" * 200]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = read_file(Task.TEXT, lines)
    assert [bad.name for bad in found.bad] == ["text.jsonl:41"]
    assert len(found.examples) == 40
