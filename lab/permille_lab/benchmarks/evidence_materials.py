"""What the evidence is made from: what a TOML file names, or our own model and the environment's folders."""

import json
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from permille.errors import InputError
from permille.files import write_atomic
from permille_lab.benchmarks.evidence_plan import Materials
from permille_lab.evaluate.user_texts import Collection, own_words, read_users

OWN_MODEL = Path(__file__).parents[2] / "reference-6M"
_MODELS = ("stories260K-hf", "reference-7M")
_TASK_FILES = {
    "sst2": {"train": "SST-2_glue/train.tsv", "test": "SST-2_glue/dev.tsv"},  # stages of one task take it
    "boolq": {"train": "BoolQ/val.jsonl"},
    "rte": {"train": "RTE/train.jsonl", "test": "RTE/val.jsonl"},
    "copa": {"train": "COPA/train.jsonl", "test": "COPA/test_with_gold.jsonl"},
    "wsc": {"train": "WSC/train.jsonl", "test": "WSC/val.jsonl"},
}
_TWEETS = 4
"""Of a person: so a test part of 400 is of a hundred people."""


def find_materials(path: Path | None, models: Sequence[Path] | None, folder: Path) -> Materials:
    """The materials of a file, or of PERMILLE_MODELS and PERMILLE_DATA.

    Args:
        path: TOML with `models`, `corpus` and `[tasks.<name>]`; paths are relative to it.
        models: take the place of those that the file or the environment names.
        folder: of the evidence, where the environment's people are written as rows of the task `text`.

    Raises:
        InputError: no file and no environment, or not what is expected there.
    """
    materials = _of_environment(models, folder) if path is None else _of_file(path, models)
    materials.check()
    return materials


def _of_file(path: Path, models: Sequence[Path] | None) -> Materials:
    folder = path.parent
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        return Materials(
            models=tuple(models or [folder / name for name in found["models"]]),
            tasks={
                name: {key: folder / value for key, value in files.items()}
                for name, files in found["tasks"].items()
            },
            corpus=folder / found["corpus"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(
            f"expected models, corpus and [tasks.<name>] as TOML in {path}, got {exc!r}"
        ) from exc


def _of_environment(models: Sequence[Path] | None, folder: Path) -> Materials:
    data = Path(_environment("PERMILLE_DATA"))
    found = tuple(models or _models())
    tasks = {
        name: {key: data / "tasks" / value for key, value in files.items()}
        for name, files in _TASK_FILES.items()
    }
    try:
        tasks["text"] = {"train": _tweets(data, folder / "tweets.jsonl")}
    except InputError as exc:
        print(f"without the task text: {exc}", file=sys.stderr)
    return Materials(
        models=found,
        tasks=tasks,
        corpus=data / "text/c4_en/c4_sample.jsonl",
    )


def _tweets(data: Path, path: Path) -> Path:
    """The first tweets of everybody of LaMP-7, as rows of the task `text`; whole people on one side."""
    found = read_users(data, Collection.LAMP7)
    if found.bad:
        first = f"{found.bad[0].name}: {found.bad[0].reason}"
        print(f"left out {len(found.bad)} lines of LaMP-7, such as {first}", file=sys.stderr)
    rows = [
        {"group": person.name, "text": own_words(document)}
        for person in found.users
        for document in person.documents[:_TWEETS]
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    return path


def _models() -> list[Path]:
    """The project's own, and those of the environment."""
    return [OWN_MODEL, *(Path(_environment("PERMILLE_MODELS")) / name for name in _MODELS)]


def _environment(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError as exc:
        raise InputError(
            f"expected the environment variable {name} to name a folder, or --materials"
        ) from exc
