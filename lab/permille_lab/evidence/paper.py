"""Measure the table of the sensitive-sparse paper on SmolLM2-135M: accuracies of zeroth and first order.

    PERMILLE_DATA=DIR python -m permille_lab.evidence.paper --part zero-shot
    PERMILLE_DATA=DIR python -m permille_lab.evidence.paper --minutes 600

All cells take hours of one core, so the first seed of all cells comes first. A killed run loses at most a
minute of training, and the same command continues. `paper_page` shows what is finished.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from permille.errors import PermilleError
from permille.models.gguf.folder import model_folder
from permille_lab.evaluate.sweep import run_sweep
from permille_lab.evidence.__main__ import TASK_FILES, TimeIsUpError, progress_until
from permille_lab.evidence.plan import DENSITY, SEEDS, Materials, Unit
from permille_lab.evidence.records import describe
from permille_lab.measuring.cells import FOLDER, RESULTS
from permille_lab.measuring.model_packages import SMOLLM2_FILE, folder_from_environment

MODEL = "SmolLM2-135M-Instruct"
ROWS = {"sst2": (8, 96), "rte": (8, 256), "boolq": (4, 384), "copa": (8, 64)}
"""Number of rows in a step, and largest number of tokens in a row, by task. Long rows are fewer."""
_REFERENCES = {"zero-shot": ("zero-shot",), "in-context": ("icl:8",)}
_TRAINED = {
    "first-order": ("fo:sensitive-c4", "fo:lora-8"),
    "minimal": ("zo:sensitive-c4", "zo:random", "zo:lora-8"),
    "others": ("zo:sensitive-task", "zo:outliers"),
    "queries": ("zo:sensitive-c4",),
    "reading": ("fo:lora-8",),
}
"""Methods by part. The part `queries` has 16 directions and one row a step.

The part `reading` is one run without a search. It shows whether the model can learn a task of long rows.
"""
_ONCE = frozenset({"zero-shot"})
"""Parts that do not depend on the seed, because the test items are the same for all seeds."""


def planned(model: Path) -> list[Unit]:
    """Return every sweep of the table. The most informative ones come first.

    Only first order is planned for tasks other than SST-2, to see whether the model reads them.
    """
    parts = [
        ("sst2", base, part) for part in ("minimal", "first-order", "others") for base in ("nf4", "bf16")
    ]
    parts += [("copa", "bf16", "first-order"), ("rte", "bf16", "reading"), ("boolq", "bf16", "reading")]
    parts += [("sst2", "nf4", "queries")]
    references = [(task, base, part) for part in _REFERENCES for base in ("nf4", "bf16") for task in ROWS]
    return [
        *(_trained(model, task, base, part) for task, base, part in parts),
        *(_reference(model, task, base, part) for task, base, part in references),
    ]


def _reference(model: Path, task: str, base: str, part: str) -> Unit:
    """Return the sweep of a method that trains nothing."""
    choices: dict[str, Any] = {
        "methods": list(_REFERENCES[part]),
        "bases": [base],
        "seeds": SEEDS[:1] if part in _ONCE else SEEDS,
        "density": DENSITY,
        "queries": 1,
        # Without training, the rows of a step have no effect. SST-2's 16 keep the results valid.
        "batch_size": 16 if task == "sst2" else ROWS[task][0],
        "max_tokens": ROWS[task][1],
        "sizes": (1000, 128, 400),
        "evaluations": 5,
        "trials": 1,
        "zo_steps": 1000,
        "fo_steps": 100,
        "tuning_seeds": 1,
        "estimator": "spsa",
    }
    return Unit(stage="references", model=model, task=task, name=f"{task}-{base}-{part}", choices=choices)


def _trained(model: Path, task: str, base: str, part: str) -> Unit:
    """Return a sweep that tunes each method over 1, 10 and 100 times its first step, and beyond an edge.

    The part `reading` tunes nothing.

    First order begins at AdamW's 1e-3, so its factors are 0.1, 1 and 10.
    """
    rows, tokens = ROWS[task]
    reading = part == "reading"
    # 16 directions of one row are twice the passes of one direction of eight rows.
    many = part == "queries"
    choices: dict[str, Any] = {
        "methods": list(_TRAINED[part]),
        "bases": [base],
        "seeds": SEEDS[:1] if reading else SEEDS,
        "density": DENSITY,
        "estimator": "spsa",
        "queries": 16 if many else 1,
        "zo_steps": 250 if many else 500,
        "trial_steps": 50 if many else 100,
        "fo_steps": 100,
        "batch_size": 1 if many else rows,
        "max_tokens": tokens,
        "sizes": (1000, 128, 400),
        "evaluations": 2,
        "trials": 1 if reading else 3,
        "grid_middle": 1.0 if part == "first-order" else 10.0,
        "grid_factor": 10.0,
        "tuning_seeds": 1,
    }
    if part == "first-order":
        # Both are for zeroth order. These values keep the results valid.
        choices |= {"zo_steps": 100, "trial_steps": None}
    stage, name = ("untuned", part) if reading else ("tuned", f"tuned-{part}")
    return Unit(stage=stage, model=model, task=task, name=f"{task}-{base}-{name}", choices=choices)


def materials() -> Materials:
    """Return the tasks and the corpus in the folder PERMILLE_DATA.

    Raises:
        SystemExit: the variable is not set.
    """
    data = folder_from_environment("PERMILLE_DATA")
    return Materials(
        models=(),
        tasks={task: {key: data / "tasks" / name for key, name in TASK_FILES[task].items()} for task in ROWS},
        corpus=data / "text/c4_en/c4_sample.jsonl",
    )


def named(folder: Path) -> Path:
    """Link the model's folder under the model's name, and return the link.

    The name of the folder is a digest, but results name the model.
    """
    link = FOLDER / MODEL
    link.unlink(missing_ok=True)
    link.symlink_to(folder.absolute())
    return link


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing cells. Exit status: 0 done or out of minutes, 1 refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=RESULTS / "paper", help="results")
    parser.add_argument("--gguf", type=Path, default=SMOLLM2_FILE, help="the model")
    parser.add_argument("--part", choices=[*_TRAINED, *_REFERENCES], help="run only this part")
    parser.add_argument("--task", choices=ROWS, help="run only this task")
    parser.add_argument("--base", choices=("bf16", "nf4"), help="run only this base")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="number of seeds")
    parser.add_argument("--minutes", type=float, help="begin no new cell after this time")
    options = parser.parse_args(arguments)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    texts = materials()
    try:
        model = named(model_folder(options.gguf, FOLDER))
        units = planned(model)
        describe(options.folder, units)
        for seeds in range(1, options.seeds + 1):
            for unit in units:
                part = unit.name.split("-", 2)[2].removeprefix("tuned-")
                asked = (options.part, options.task, options.base)
                own_names = (part, unit.task, unit.choices["bases"][0])
                if all(name in (None, own) for name, own in zip(asked, own_names, strict=True)):
                    own = replace(unit, choices={**unit.choices, "seeds": unit.choices["seeds"][:seeds]})
                    path = options.folder / f"{unit.name}.jsonl"
                    run_sweep(own.sweep(texts), path, progress_until(end))
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except TimeIsUpError:
        print("the minutes are over; run the same command to continue", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
