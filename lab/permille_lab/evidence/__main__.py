"""Test the papers' claims on sensitive weights with small models: `make evidence`.

    python -m permille_lab.evidence --models DIR/stories260K-hf DIR/reference-7M
    python -m permille_lab.evidence --stage table --task text --minutes 60

You can stop it at any time. Each finished cell and each trial of a search is stored in lab/results/evidence.
The same command continues, if models, texts and the version of permille are the same. `python -m
permille_lab.pages` writes the page.

PERMILLE_MODELS is a folder of models. PERMILLE_DATA is a folder of tasks, text and people. Alternatively,
`--materials FILE` is a TOML file with `models`, `corpus` and `[tasks.<name>]`, as in the file of a sweep.

Times in hours of one core with AVX-512, for the model with 260 thousand and the one with 7 million weights:

    table of the first task      1.3    2.2
    table of people's text       2.3    4.5
    fractions                    1.0    1.3
    longer                       0.7    1.3
    each other stage             less
"""

import argparse
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from permille.errors import InputError, PermilleError
from permille.files import write_atomic
from permille_lab.evaluate.sweep import run_sweep
from permille_lab.evidence.page import claims_table
from permille_lab.evidence.plan import STAGES, Materials, planned
from permille_lab.evidence.records import describe
from permille_lab.measuring.cells import RESULTS
from permille_lab.people.user_texts import Collection, own_words, read_users

_MODELS = ("stories260K-hf", "reference-7M")
TASK_FILES = {
    "sst2": {"train": "SST-2_glue/train.tsv", "test": "SST-2_glue/dev.tsv"},
    "boolq": {"train": "BoolQ/val.jsonl"},
    "rte": {"train": "RTE/train.jsonl", "test": "RTE/val.jsonl"},
    "copa": {"train": "COPA/train.jsonl", "test": "COPA/test_with_gold.jsonl"},
    "wsc": {"train": "WSC/train.jsonl", "test": "WSC/val.jsonl"},
}
_TWEETS = 4
"""Number of tweets taken from each person. A test part of 400 tweets thus has a hundred people."""


class TimeIsUpError(Exception):
    """The minutes are over: no new cell and no new trial may begin."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing cells, then print the verdicts. Exit status: 0 done or out of minutes, 1 refused."""
    options = _parser().parse_args(arguments)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    try:
        materials = find_materials(options.materials, options.models, options.folder)
        run(materials, options.folder, options, progress_until(end))
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except TimeIsUpError:
        print("the minutes are over; run the same command to continue", file=sys.stderr)
    print(claims_table(options.folder))
    return 0


def run(
    materials: Materials, folder: Path, options: argparse.Namespace, progress: Callable[[int, int, str], None]
) -> None:
    """Run every planned sweep that the options select.

    Raises:
        InputError: a model, a task file or an older results file is unusable.
    """
    units = planned(materials)
    describe(folder, units)
    for unit in units:
        wanted = (options.stage, unit.stage), (options.model, unit.model.name), (options.task, unit.task)
        if all(asked in (None, own) for asked, own in wanted):
            run_sweep(unit.sweep(materials), folder / f"{unit.name}.jsonl", progress)


def progress_until(end: float | None) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, following: str) -> None:
        if following:
            print(f"[{done}/{total}] {following}", file=sys.stderr, flush=True)
            if end is not None and time.monotonic() >= end:
                raise TimeIsUpError

    return progress


def find_materials(path: Path | None, models: Sequence[Path] | None, folder: Path) -> Materials:
    """Return the materials of a TOML file, or without a file those of PERMILLE_MODELS and PERMILLE_DATA.

    Args:
        path: TOML file with `models`, `corpus` and `[tasks.<name>]`. Its paths are relative to its folder.
        models: replace the models of the file or the environment.
        folder: folder for the rows of the task `text`. They are written if the materials come from
            PERMILLE_DATA.

    Raises:
        InputError: the file or a variable is missing or unusable, there is no model or no task, or two
            models have the same name.
    """
    materials = _of_environment(models, folder) if path is None else _of_file(path, models)
    names = [model.name for model in materials.models]
    if not names or not materials.tasks or len(set(names)) < len(names):
        raise InputError(
            f"expected models of different names and tasks, got {names}, {list(materials.tasks)}"
        )
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
    tasks = {
        name: {key: data / "tasks" / value for key, value in files.items()}
        for name, files in TASK_FILES.items()
    }
    tasks["text"] = {"train": _tweets(data, folder / "tweets.jsonl")}
    own = [Path(_environment("PERMILLE_MODELS")) / name for name in _MODELS] if models is None else models
    return Materials(models=tuple(own), tasks=tasks, corpus=data / "text/c4_en/c4_sample.jsonl")


def _tweets(data: Path, path: Path) -> Path:
    """Write each LaMP-7 user's first tweets as rows of the task `text`, and return the file.

    A user's tweets have the user's name as group, so they are never in both train and test.
    """
    found = read_users(data, Collection.LAMP7)
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


def _environment(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError as exc:
        raise InputError(f"Set {name} to a folder, or use --materials.") from exc


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=RESULTS / "evidence", help="results")
    parser.add_argument("--materials", type=Path, help="TOML file of models and texts")
    parser.add_argument("--models", type=Path, nargs="+", help="transformers folders")
    parser.add_argument("--model", help="run only the model of this name")
    parser.add_argument("--task", help="run only this task")
    parser.add_argument("--stage", choices=STAGES, help="run only this stage")
    parser.add_argument("--minutes", type=float, help="begin no new cell or trial after this time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
