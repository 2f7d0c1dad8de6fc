"""Reading task files: each release's form, the labels' meaning, and what is no row of the task."""

import json
from pathlib import Path
from typing import Any

import pytest

from permille.errors import InputError
from permille_lab.evaluate import rows
from permille_lab.evaluate.examples import majority_share
from permille_lab.evaluate.prompts import Task, Wording
from permille_lab.evaluate.rows import read_file

ROWS: dict[Task, dict[str, Any]] = {
    Task.RTE: {"premise": "A cat sat.", "hypothesis": "A cat slept.", "label": "not_entailment"},
    Task.CB: {"premise": "It rains.", "hypothesis": "It is wet", "label": "neutral"},
    Task.BOOLQ: {"passage": "Tea is a drink.", "question": "is tea a drink", "label": True},
    Task.WSC: {
        "text": "Ann told Eve that she won.",
        "target": {"span1_text": "Ann", "span2_text": "she"},
        "label": False,
    },
    Task.WIC: {"word": "bank", "sentence1": "A bank.", "sentence2": "The bank.", "label": True},
    Task.COPA: {
        "premise": "I fell.",
        "choice1": "The floor was wet.",
        "choice2": "I sang.",
        "question": "cause",
        "label": 0,
    },
    Task.WINOGRANDE: {
        "qID": "3X-1",
        "sentence": "The cup fell off the desk because _ was tilted.",
        "option1": "the cup",
        "option2": "the desk",
        "answer": "2",
    },
}
# Prompt, and the candidate that the label names.
WORDED = {
    Task.RTE: ('A cat sat.\nDoes this mean that "A cat slept." is true? Yes or No?\n', "No"),
    Task.CB: ('Suppose It rains. Can we infer that "It is wet"? Yes, No, or Maybe?\n', "Maybe"),
    Task.BOOLQ: ("Tea is a drink. is tea a drink?\n", "Yes"),
    Task.WSC: (
        "Ann told Eve that she won.\n"
        'In the previous sentence, does the pronoun "she" refer to Ann? Yes or No?\n',
        "No",
    ),
    Task.WIC: (
        'Does the word "bank" have the same meaning in these two sentences? Yes, No?\nA bank.\nThe bank.\n',
        "Yes",
    ),
    Task.COPA: ("I fell because", " the floor was wet."),
    Task.WINOGRANDE: ("The cup fell off the desk because", " the desk was tilted."),
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


def test_every_label_of_a_task_names_another_candidate(tmp_path: Path) -> None:
    labels: dict[Task, list[Any]] = {
        Task.CB: ["entailment", "contradiction", "neutral"],
        Task.BOOLQ: [False, True],
    }
    answers = {Task.CB: ["Yes", "No", "Maybe"], Task.BOOLQ: ["No", "Yes"]}
    for task, values in labels.items():
        path = written(tmp_path, *(ROWS[task] | {"label": value} for value in values))
        found = [e.candidates[e.label] for e in read_file(task, path).examples]
        assert found == answers[task]


def test_other_wordings_word_otherwise(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS[Task.RTE])
    (example,) = read_file(Task.RTE, path, Wording.SENSITIVE_LLAMA).examples
    assert example.prompt == 'Suppose "A cat sat." Can we infer that "A cat slept."? Yes or No?'
    assert example.candidates == (" Yes", " No")


@pytest.mark.parametrize("header", ["sentence\tlabel\n", ""])
def test_sst2_is_read_with_and_without_a_header(header: str, tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text(header + "a fine film \t1\ndull\t0\n")
    found = [(e.prompt, e.candidates[e.label]) for e in read_file(Task.SST2, path).examples]
    assert found == [("a fine film It was", " great"), ("dull It was", " terrible")]


def test_a_row_that_is_not_utf_8_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes(b"a fine film\t1\n" * 30 + b"caf\xe9\t0\n")
    (bad,) = read_file(Task.SST2, path).bad
    assert bad.name == "train.tsv:31"
    assert "UTF-8" in bad.reason


def test_multirc_is_one_example_an_answer_and_one_group_a_passage(tmp_path: Path) -> None:
    questions = [{"question": "Who?", "answers": [{"text": "Ann", "label": 1}, {"text": "Eve", "label": 0}]}]
    path = written(tmp_path, {"passage": {"text": "Ann won.", "questions": questions}})
    examples = read_file(Task.MULTIRC, path).examples
    assert [e.candidates[e.label] for e in examples] == ["Yes", "No"]
    assert {e.group for e in examples} == {"ann won."}
    assert len({e.name for e in examples}) == 2  # answers need not have an idx of their own


def test_squad_keeps_every_reference_once(tmp_path: Path) -> None:
    answers = [{"text": "in 1066"}, {"text": "1066"}, {"text": "1066"}]
    paragraph = {"context": "It was 1066.", "qas": [{"id": "q1", "question": "When?", "answers": answers}]}
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"data": [{"title": "The_Battle", "paragraphs": [paragraph]}]}))
    (example,) = read_file(Task.SQUAD, path).examples
    assert example.references == ("in 1066", "1066")
    assert example.prompt == "Title: The Battle\nContext: It was 1066.\nQuestion: When?\nAnswer:"
    path.write_text('{"data": [{"title": 3}]}')
    with pytest.raises(InputError, match="SQuAD"):
        read_file(Task.SQUAD, path)


def test_twin_sentences_of_winogrande_are_one_group(tmp_path: Path) -> None:
    twin = ROWS[Task.WINOGRANDE] | {"qID": "3X-2", "answer": "1"}
    examples = read_file(Task.WINOGRANDE, written(tmp_path, ROWS[Task.WINOGRANDE], twin)).examples
    assert len({e.group for e in examples}) == 1


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
        (Task.WINOGRANDE, {"sentence": "no blank"}, "one blank"),
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
    with pytest.raises(InputError, match="candidates"):
        majority_share([])


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
