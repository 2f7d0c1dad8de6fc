"""Compare the training of sensitive weights with the papers' claims, on small models: `make evidence`.

    python -m permille_lab.evidence --models DIR/stories260K-hf DIR/reference-7M
    python -m permille_lab.evidence --stage table --task text --minutes 60

You can stop it at any time. Each finished cell and each trial of a search is durable in lab/results/evidence.
The same command continues if the results are of these very models, texts and this version. `python -m
permille_lab.pages` makes the page.

PERMILLE_MODELS names a folder of models, PERMILLE_DATA one of tasks, text and people. `--materials FILE`
names a TOML file instead, with `models`, `corpus` and `[tasks.<name>]` like a sweep's.

Hours of one core with AVX-512, with a quarter of a million weights and with seven million: a table of the
first task 1.3 and 2.2, of people's text 2.3 and 4.5; fractions 1.0 and 1.3; longer runs 0.7 and 1.3; the
others less.
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
"""Of a person: so a test part of 400 is of a hundred people."""


class TimeIsUpError(Exception):
    """No new cell and no new trial of a search may begin."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then print what is known. Exit status: 0 done or out of minutes, 1 refused."""
    options = _parser().parse_args(arguments)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    try:
        materials = find_materials(options.materials, options.models, options.folder)
        run(materials, options.folder, options, progress_until(end))
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except TimeIsUpError:
        print("the minutes are over; the same command goes on", file=sys.stderr)
    print(claims_table(options.folder))
    return 0


def run(
    materials: Materials, folder: Path, options: argparse.Namespace, progress: Callable[[int, int, str], None]
) -> None:
    """Run every planned sweep that the options ask for.

    Raises:
        InputError: a model, a task's file or what a former run left is not as expected.
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
    """The materials of a file, or of PERMILLE_MODELS and PERMILLE_DATA.

    Args:
        path: TOML with `models`, `corpus` and `[tasks.<name>]`; paths are relative to it.
        models: take the place of those that the file or the environment names.
        folder: where the environment's people are written as rows of the task `text`.

    Raises:
        InputError: no file and no environment, or not what is expected there.
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
    """Return the first tweets of everybody of LaMP-7, as rows of the task `text`.

    A person is on one side only.
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
        raise InputError(
            f"expected the environment variable {name} to name a folder, or --materials"
        ) from exc


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=RESULTS / "evidence", help="results")
    parser.add_argument("--materials", type=Path)
    parser.add_argument("--models", type=Path, nargs="+", help="transformers folders")
    parser.add_argument("--model", help="only this one, by name")
    parser.add_argument("--task", help="only this one")
    parser.add_argument("--stage", choices=STAGES, help="only this one")
    parser.add_argument("--minutes", type=float, help="begin no new cell or trial after these")
    return parser


if __name__ == "__main__":
    sys.exit(main())
