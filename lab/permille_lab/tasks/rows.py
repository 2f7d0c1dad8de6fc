"""Reader of task files: JSON lines as in SuperGLUE, and for tasks of GLUE also its tables.

A file is read line by line. A line that is no labelled row of the task becomes a `BadRow` with its file, line
and reason. If more than one row in twenty is bad, `read_file` raises an InputError. Thus it refuses files
without labels, such as SuperGLUE's test files.

Two tasks take data of your own:

    choice   {"prompt": ..., "candidates": [...], "label": 0}
    text     {"text": ...} or {"prompt": ..., "completion": ...}         documents, as the agent reads them

Rows of both may have a `group`, such as a person or a passage. Examples of a group are never in two splits.

Prompts are those of table 6 (appendix C.5) of "Zeroth-order fine-tuning of LLMs with extreme sparsity", after
MeZO and PromptSource. We deviate from the printed table in these points:

- Line breaks are those of MeZO's templates.
- A question ends with exactly one question mark.
- "so" or "because" joins premise and answer into one sentence. The answer starts in lower case, unless its
  first word is "I".

MRPC, QQP, QNLI and WNLI have the prompts of table 7 (appendix A.3) of the paper on P-RGE, as printed there.
In that table the question of QNLI is called "Sentence", too.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from permille.errors import InputError
from permille_lab.tasks.examples import BadRow, Example, Pool, Task

MAX_LINE_BYTES = 4 << 20
MAX_BAD_SHARE = 0.05
"""Largest share of bad rows. A file with more is probably of another task."""

Row = Mapping[str, Any]


class _BadRowError(ValueError):
    """The reason that a row is no example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The form of a task's rows.

    Attributes:
        texts: fields that must contain text.
        labels: index of each label, as data releases write it.
        prompt: makes the text before the answer.
        candidates: makes the answers, in the order of the labels.
        group: the text field that several examples may share.
        headers: columns of the texts and the label in the task's table. Empty if there is no table.
    """

    texts: tuple[str, ...]
    labels: Mapping[Any, int]
    prompt: Callable[[Row], str]
    candidates: Callable[[Row], tuple[str, ...]]
    group: str
    headers: Mapping[str, str] = field(default_factory=dict)


def _pair_prompt(asked: str, kind: str, first: str, second: str) -> Callable[[Row], str]:
    return lambda row: (
        f"{asked} Yes or No?\n{kind} 1: {row[first].strip()}\n{kind} 2: {row[second].strip()}\n"
    )


def _rte_prompt(row: Row) -> str:
    return f'{row["premise"]}\nDoes this mean that "{row["hypothesis"]}" is true? Yes or No?\n'


def _wsc_prompt(row: Row) -> str:
    target = row.get("target")
    spans = [target.get(key) if isinstance(target, dict) else None for key in ("span1_text", "span2_text")]
    if not all(isinstance(span, str) for span in spans):
        raise _BadRowError(f"expected target with span1_text and span2_text, got {target!r:.60}")
    return (
        f'{row["text"]}\nIn the previous sentence, does the pronoun "{spans[1]}" refer to {spans[0]}? '
        "Yes or No?\n"
    )


def _copa_prompt(row: Row) -> str:
    joints = {"effect": "so", "cause": "because"}
    if row["question"] not in joints:
        raise _BadRowError(f"expected question 'cause' or 'effect', got {row['question']!r:.60}")
    return f"{row['premise'].strip().rstrip('.')} {joints[row['question']]}"


def _continued(sentence: str) -> str:
    first = sentence.split(maxsplit=1)[0]
    return sentence if first == "I" or first.startswith("I'") else sentence[:1].lower() + sentence[1:]


def _always(*candidates: str) -> Callable[[Row], tuple[str, ...]]:
    return lambda _: candidates


_BINARY: dict[Any, int] = {"0": 0, "1": 1, 0: 0, 1: 1}
_FORMS: Mapping[Task, _Form] = {
    Task.SST2: _Form(
        texts=("sentence",),
        labels=_BINARY | {"negative": 0, "positive": 1},
        prompt=lambda row: f"{row['sentence'].strip()} It was",
        candidates=_always(" terrible", " great"),
        group="sentence",
        headers={"sentence": "sentence", "label": "label"},
    ),
    Task.RTE: _Form(
        texts=("premise", "hypothesis"),
        labels={"entailment": 0, "not_entailment": 1},
        prompt=_rte_prompt,
        candidates=_always("Yes", "No"),
        group="premise",
    ),
    Task.BOOLQ: _Form(
        texts=("passage", "question"),
        labels={False: 0, True: 1},
        prompt=lambda row: f"{row['passage']} {row['question'].strip().rstrip('?')}?\n",
        candidates=_always("No", "Yes"),
        group="passage",
    ),
    Task.WSC: _Form(
        texts=("text",),
        labels={False: 0, True: 1},
        prompt=_wsc_prompt,
        candidates=_always("No", "Yes"),
        group="text",
    ),
    Task.COPA: _Form(
        texts=("premise", "choice1", "choice2", "question"),
        labels={0: 0, 1: 1},
        prompt=_copa_prompt,
        candidates=lambda row: tuple(f" {_continued(row[key])}" for key in ("choice1", "choice2")),
        group="premise",
    ),
    Task.MRPC: _Form(
        texts=("sentence1", "sentence2"),
        labels=_BINARY | {"not_equivalent": 0, "equivalent": 1},
        prompt=_pair_prompt(
            "Do the following two sentences mean the same thing?", "Sentence", "sentence1", "sentence2"
        ),
        candidates=_always("No", "Yes"),
        group="sentence1",
        headers={"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
    ),
    Task.QQP: _Form(
        texts=("question1", "question2"),
        labels=_BINARY | {"not_duplicate": 0, "duplicate": 1},
        prompt=_pair_prompt(
            "Are these two questions asking the same thing?", "Question", "question1", "question2"
        ),
        candidates=_always("No", "Yes"),
        group="question1",
        headers={"question1": "question1", "question2": "question2", "label": "is_duplicate"},
    ),
    Task.QNLI: _Form(
        texts=("question", "sentence"),
        labels={"not_entailment": 0, "entailment": 1},
        prompt=_pair_prompt("Does this sentence answer the question?", "Sentence", "question", "sentence"),
        candidates=_always("No", "Yes"),
        group="sentence",
        headers={"question": "question", "sentence": "sentence", "label": "label"},
    ),
    Task.WNLI: _Form(
        texts=("sentence1", "sentence2"),
        labels=_BINARY | {"not_entailment": 0, "entailment": 1},
        prompt=_pair_prompt(
            "Given the first sentence, is the second sentence true?", "Sentence", "sentence1", "sentence2"
        ),
        candidates=_always("No", "Yes"),
        group="sentence1",
        headers={"sentence1": "sentence1", "sentence2": "sentence2", "label": "label"},
    ),
}


def read_file(task: Task, path: Path) -> Pool:
    """Read the labelled examples of one file, and the rows that could not be read.

    For example, `read_file(Task.BOOLQ, data / "tasks/BoolQ/val.jsonl").examples`.

    Args:
        path: a `.jsonl` file, or a `.tsv` file of GLUE. That of SST-2 may have no header.

    Raises:
        InputError: the file does not exist or has no labelled row, or more than one row in twenty is bad.
    """
    if not path.is_file():
        raise InputError(f"expected a file of {task.value} rows, got {path}")
    examples: list[Example] = []
    bad: list[BadRow] = []
    rows = _Table(task).row if path.suffix == ".tsv" else _json_rows
    for name, found in _lines(path):
        try:
            if isinstance(found, _BadRowError):
                raise found
            row = rows(name, found)
            if row is not None:
                examples.append(_example(task, row, name))
        except _BadRowError as exc:
            bad.append(BadRow(name=name, reason=str(exc)))
    if not examples or len(bad) > MAX_BAD_SHARE * (len(examples) + len(bad)):
        first = f"; the first bad one is {bad[0].name}: {bad[0].reason}" if bad else ""
        raise InputError(
            f"expected labelled rows of {task.value} in {path.name}, got {len(examples)} and "
            f"{len(bad)} bad ones{first}"
        )
    return Pool(examples=examples, bad=bad)


def _lines(path: Path) -> Iterator[tuple[str, bytes | _BadRowError]]:
    """Yield each line with its file and number. A line that is too long is not kept in memory."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            name = f"{path.name}:{number}"
            if len(line) <= MAX_LINE_BYTES:
                yield name, line
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            yield name, _BadRowError(f"expected a line of at most {MAX_LINE_BYTES} bytes, got a longer one")


def _json_rows(_: str, line: bytes) -> Row | None:
    if not line.strip():
        return None
    try:
        found = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise _BadRowError(f"expected a JSON object, got {exc}") from exc
    if not isinstance(found, dict):
        raise _BadRowError(f"expected a JSON object, got {type(found).__name__}")
    return found


class _Table:
    """A table of GLUE: tabs separate cells, quotes are text, and the first line may be a header."""

    def __init__(self, task: Task) -> None:
        self._headers: Mapping[str, str] = _FORMS[task].headers if task in _FORMS else {}
        self._places = {key: place for place, key in enumerate(self._headers)}
        self._width = len(self._headers)

    def row(self, name: str, line: bytes) -> Row | None:
        is_first = name.endswith(":1")
        try:
            cells = line.decode("utf-8-sig" if is_first else "utf-8").rstrip("\r\n").split("\t")
        except UnicodeDecodeError as exc:
            raise _BadRowError(f"expected UTF-8, got {exc}") from exc
        if is_first and set(self._headers.values()) <= set(cells):
            self._places = {key: cells.index(header) for key, header in self._headers.items()}
            self._width = len(cells)
            return None
        if not self._places or len(cells) != self._width:
            raise _BadRowError(f"expected {self._width} cells, got {len(cells)}")
        return {key: cells[place].strip() for key, place in self._places.items()}


def _example(task: Task, row: Row, name: str) -> Example:
    if task is Task.TEXT:
        found = _document(row, name)
    elif task is Task.CHOICE:
        found = _choice(row, name)
    else:
        form = _FORMS[task]
        for key in form.texts:
            _check_text(row, key)
        found = Example(
            prompt=form.prompt(row),
            candidates=form.candidates(row),
            label=_label(form.labels, row.get("label")),
            # Copies of a passage may differ in case and spacing.
            group=" ".join(row[form.group].casefold().split()),
            name=name,
        )
    try:
        "".join((found.prompt, found.group, *found.candidates)).encode()
    except UnicodeEncodeError as exc:
        raise _BadRowError(f"expected Unicode, got a lone surrogate: {exc.reason}") from exc
    return found


def _choice(row: Row, name: str) -> Example:
    _check_text(row, "prompt")
    candidates, label = row.get("candidates"), row.get("label")
    if (
        not isinstance(candidates, list)
        or len(set(map(str, candidates))) < max(2, len(candidates))
        or not all(isinstance(each, str) and each.strip() for each in candidates)
    ):
        raise _BadRowError(f"expected candidates, two texts or more, each once, got {candidates!r:.60}")
    if type(label) is not int or not 0 <= label < len(candidates):
        raise _BadRowError(f"expected label from 0 to {len(candidates) - 1}, got {label!r:.60}")
    return Example(
        prompt=row["prompt"],
        candidates=tuple(candidates),
        label=label,
        group=_named_group(row) or " ".join(row["prompt"].casefold().split()),
        name=name,
    )


def _document(row: Row, name: str) -> Example:
    given = {key: value for key, value in row.items() if value is not None}
    found = sorted(given.keys() & {"text", "prompt", "completion"})
    if found not in (["text"], ["completion", "prompt"]):
        raise _BadRowError(f"expected either 'text' or 'prompt' and 'completion', got {found}")
    prompt, text = given.get("prompt", ""), given[found[0]]
    if not isinstance(prompt, str):
        raise _BadRowError(f"expected text in 'prompt', got {prompt!r:.60}")
    _check_text(given, found[0])
    group = _named_group(given) or " ".join((prompt + text).casefold().split())
    return Example(prompt=prompt, candidates=(text,), label=0, group=group, name=name, document=True)


def _named_group(row: Row) -> str | None:
    if row.get("group") is None:
        return None
    _check_text(row, "group")
    return str(row["group"])


def _check_text(row: Row, key: str) -> None:
    if not isinstance(row.get(key), str) or not row[key].strip():
        raise _BadRowError(f"expected text in {key!r}, got {row.get(key)!r:.60}")


def _label(known: Mapping[Any, int], value: object) -> int:
    # True equals 1 in Python, so compare types: a task with boolean labels must not accept numbers.
    for label, index in known.items():
        if type(value) is type(label) and value == label:
            return index
    raise _BadRowError(f"expected 'label' of {list(known)}, got {value!r:.60}")
