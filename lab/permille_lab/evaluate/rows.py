"""Files of a task as examples: SuperGLUE's JSON lines, GLUE's tables, SQuAD's JSON.

A file is read line by line. What is not a labelled row of the task becomes a `BadRow` with its place and the
reason; unlabelled rows (SuperGLUE's own test files) make the whole file unlabelled, which `read_file` says by
an InputError, because a test set without labels is a mistake in the choice of files.

Documents of the task `text` are rows with `text`, or with `prompt` and `completion`; those of one `group` (a
person, say) stand together.

Labels as the releases write them: `true`/`false` (BoolQ, WSC, WiC), 0/1 (SST-2, COPA, MultiRC), words (RTE,
CB), "1"/"2" (WinoGrande).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from permille.errors import InputError
from permille_lab.evaluate.examples import BadRow, Example, Pool
from permille_lab.evaluate.prompts import Row, Task, Wording, worded

MAX_LINE_BYTES = 4 << 20
MAX_BAD_SHARE = 0.05
"""More bad rows than this is another file than the task's."""

_LABELS: Mapping[Task, Mapping[Any, int]] = {
    Task.SST2: {"0": 0, "1": 1, 0: 0, 1: 1, "negative": 0, "positive": 1},
    Task.RTE: {"entailment": 0, "not_entailment": 1},
    Task.CB: {"entailment": 0, "contradiction": 1, "neutral": 2},
    Task.BOOLQ: {False: 0, True: 1},
    Task.WSC: {False: 0, True: 1},
    Task.WIC: {False: 0, True: 1},
    Task.MULTIRC: {0: 0, 1: 1},
    Task.COPA: {0: 0, 1: 1},
    Task.WINOGRANDE: {"1": 0, "2": 1},
}
_TEXTS: Mapping[Task, tuple[str, ...]] = {
    Task.SST2: ("sentence",),
    Task.RTE: ("premise", "hypothesis"),
    Task.CB: ("premise", "hypothesis"),
    Task.BOOLQ: ("passage", "question"),
    Task.WSC: ("text",),
    Task.WIC: ("word", "sentence1", "sentence2"),
    Task.MULTIRC: ("paragraph", "question", "answer"),
    Task.COPA: ("premise", "choice1", "choice2", "question"),
    Task.WINOGRANDE: ("sentence", "option1", "option2"),
    Task.SQUAD: ("title", "context", "question"),
    Task.TEXT: (),
}
_GROUP: Mapping[Task, Callable[[Row], str]] = {
    Task.SST2: lambda row: row["sentence"],
    Task.RTE: lambda row: row["premise"],
    Task.CB: lambda row: row["premise"],
    Task.BOOLQ: lambda row: row["passage"],
    Task.WSC: lambda row: row["text"],
    Task.WIC: lambda row: row["word"],
    Task.MULTIRC: lambda row: row["paragraph"],
    Task.COPA: lambda row: row["premise"],
    # Twin sentences differ in a word or two; their ids differ in the last part alone.
    Task.WINOGRANDE: lambda row: str(row.get("qID", row["sentence"])).rsplit("-", 1)[0],
    Task.SQUAD: lambda row: row["context"],
    Task.TEXT: lambda row: row.get("prompt", "") + row.get("completion", row.get("text", "")),
}


class _BadRowError(ValueError):
    """Why a row is no example."""


def read_file(task: Task, path: Path, wording: Wording = Wording.SENSITIVE) -> Pool:
    """The labelled examples of one file, with the rows that could not be read.

    Args:
        path: `.jsonl`, `.tsv` (SST-2, with or without a header) or `.json` (SQuAD).

    Raises:
        InputError: no such file; no labelled row; or more than one row in twenty is bad.
    """
    if not path.is_file():
        raise InputError(f"expected a file of {task.value} rows, got {path}")
    examples: list[Example] = []
    bad: list[BadRow] = []
    for name, found in _rows(task, path):
        try:
            if isinstance(found, _BadRowError):
                raise found
            examples.append(_example(task, found, wording, name))
        except _BadRowError as exc:
            bad.append(BadRow(name=name, reason=str(exc)))
    if not examples or len(bad) > MAX_BAD_SHARE * (len(examples) + len(bad)):
        first = f"; the first bad one is {bad[0].name}: {bad[0].reason}" if bad else ""
        raise InputError(
            f"expected labelled rows of {task.value} in {path.name}, got {len(examples)} and "
            f"{len(bad)} bad ones{first}"
        )
    return Pool(examples=examples, bad=bad)


def _rows(task: Task, path: Path) -> Iterator[tuple[str, Row | _BadRowError]]:
    if task is Task.SQUAD:
        yield from _squad_rows(path)
    elif path.suffix == ".tsv":
        yield from _table_rows(path)
    else:
        for name, found in _json_lines(path):
            if task is Task.MULTIRC and not isinstance(found, _BadRowError) and "passage" in found:
                yield from _multirc_rows(name, found)
            else:
                yield name, found


def _lines(path: Path) -> Iterator[tuple[str, bytes | _BadRowError]]:
    """Lines by name and number; one that is too long is not kept in memory."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            name = f"{path.name}:{number}"
            if len(line) <= MAX_LINE_BYTES:
                yield name, line
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            yield name, _BadRowError(f"expected a line of at most {MAX_LINE_BYTES} bytes, got a longer one")


def _json_lines(path: Path) -> Iterator[tuple[str, Row | _BadRowError]]:
    for name, line in _lines(path):
        if isinstance(line, _BadRowError):
            yield name, line
            continue
        if not line.strip():
            continue
        try:
            found = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as exc:
            yield name, _BadRowError(f"expected a JSON object, got {exc}")
            continue
        if isinstance(found, dict):
            yield name, found
        else:
            yield name, _BadRowError(f"expected a JSON object, got {type(found).__name__}")


def _table_rows(path: Path) -> Iterator[tuple[str, Row | _BadRowError]]:
    """SST-2: `sentence <tab> label`, GLUE with a header line, the sentence-level release without."""
    for place, (name, line) in enumerate(_lines(path)):
        if isinstance(line, _BadRowError):
            yield name, line
            continue
        try:
            cells = line.decode("utf-8" if place else "utf-8-sig").rstrip("\r\n").split("\t")
        except UnicodeDecodeError as exc:
            yield name, _BadRowError(f"expected UTF-8, got {exc}")
            continue
        if not place and cells == ["sentence", "label"]:
            continue
        if len(cells) == 2:
            yield name, {"sentence": cells[0], "label": cells[1].strip()}
        else:
            yield name, _BadRowError(f"expected a sentence and a label, got {len(cells)} cells")


def _multirc_rows(name: str, row: Row) -> Iterator[tuple[str, Row | _BadRowError]]:
    """SuperGLUE nests questions and answers below their passage; one example is one answer."""
    try:
        passage = row["passage"]
        for number, question in enumerate(passage["questions"], start=1):
            for place, answer in enumerate(question["answers"], start=1):
                yield (
                    f"{name}.{number}.{place}",
                    {
                        "paragraph": passage["text"],
                        "question": question["question"],
                        "answer": answer["text"],
                        "label": answer.get("label"),
                    },
                )
    except (KeyError, TypeError, AttributeError) as exc:
        yield name, _BadRowError(f"expected passage, questions and answers, got {exc!r}")


def _squad_rows(path: Path) -> Iterator[tuple[str, Row | _BadRowError]]:
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in question["answers"]))
                    yield (
                        f"{path.name}:{question['id']}",
                        {
                            "title": article["title"].replace("_", " "),
                            "context": paragraph["context"],
                            "question": question["question"],
                            "references": answers,
                        },
                    )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise InputError(
            f"expected SQuAD's JSON (data, paragraphs, qas) in {path.name}, got {exc!r}"
        ) from exc


def _example(task: Task, row: Row, wording: Wording, name: str) -> Example:
    for key in _TEXTS[task]:
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise _BadRowError(f"expected text in {key!r}, got {row.get(key)!r:.60}")
    if task is Task.TEXT:
        row = {key: value for key, value in row.items() if value is not None}
    _check_task(task, row)
    words = worded(task, row, wording)
    _check_unicode(words.prompt, *words.candidates, *row.get("references", ()), _group(task, row))
    if task is Task.SQUAD:
        if not row["references"]:
            raise _BadRowError("expected at least one answer, got none")
        return Example(
            prompt=words.prompt,
            candidates=(),
            label=-1,
            references=row["references"],
            group=_group(task, row),
            name=name,
        )
    return Example(
        prompt=words.prompt,
        candidates=words.candidates,
        label=0 if task is Task.TEXT else _label(task, row),
        group=_group(task, row),
        name=name,
        document=task is Task.TEXT,
    )


def _label(task: Task, row: Row) -> int:
    key = "answer" if task is Task.WINOGRANDE else "label"
    value = row.get(key)
    known = _LABELS[task]
    # True equals 1 in Python: a boolean task must not take numbers, nor the other way round.
    for label, index in known.items():
        if type(value) is type(label) and value == label:
            return index
    raise _BadRowError(f"expected {key!r} of {list(known)}, got {value!r:.60}")


def _check_task(task: Task, row: Row) -> None:
    if task is Task.WSC:
        target = row.get("target")
        spans = isinstance(target, dict) and all(
            isinstance(target.get(key), str) for key in ("span1_text", "span2_text")
        )
        if not spans:
            raise _BadRowError(f"expected target with span1_text and span2_text, got {target!r:.60}")
    if task is Task.TEXT:
        _check_document(row)
    if task is Task.COPA and row["question"] not in ("cause", "effect"):
        raise _BadRowError(f"expected question 'cause' or 'effect', got {row['question']!r:.60}")
    if task is Task.WINOGRANDE and row["sentence"].count("_") != 1:
        raise _BadRowError(f"expected one blank '_' in the sentence, got {row['sentence'].count('_')}")


def _check_document(row: Row) -> None:
    found = sorted(row.keys() & {"text", "prompt", "completion"})
    if found not in (["text"], ["completion", "prompt"]):
        raise _BadRowError(f"expected either 'text' or 'prompt' and 'completion', got {found}")
    for key in (*found, *(row.keys() & {"group"})):
        if not isinstance(row[key], str) or not (row[key].strip() or key == "prompt"):
            raise _BadRowError(f"expected text in {key!r}, got {row[key]!r:.60}")


def _check_unicode(*texts: str) -> None:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as exc:
        raise _BadRowError(f"expected Unicode, got a lone surrogate: {exc.reason}") from exc


def _group(task: Task, row: Row) -> str:
    """The text that examples share, without case and spacing, in which repeated passages differ; or what a
    document names."""
    if task is Task.TEXT and "group" in row:
        return str(row["group"])
    return " ".join(_GROUP[task](row).casefold().split())
