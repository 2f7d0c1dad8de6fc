"""Measure the table of the sensitive-sparse paper on SmolLM2-135M: accuracies of zeroth and first order.

    PERMILLE_DATA=DIR python -m permille_lab.evidence.paper --part zero-shot
    PERMILLE_DATA=DIR python -m permille_lab.evidence.paper --minutes 600

All cells take days of one core. The first seed of all cells therefore comes first. A stopped run continues.
The page shows which cells are not finished.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from permille.errors import PermilleError
from permille.models.gguf.folder import model_folder
from permille_lab.evaluate.sweep import run_sweep
from permille_lab.evidence.__main__ import TASK_FILES, TimeIsUpError, progress_until
from permille_lab.evidence.page import claims_table
from permille_lab.evidence.plan import DENSITY, REAL_PREFIX, SEEDS, STATIC, Materials, Unit
from permille_lab.evidence.records import describe, read_records
from permille_lab.measuring.cells import FOLDER, RESULTS
from permille_lab.measuring.model_packages import SMOLLM2_FILE, folder_from_environment
from permille_lab.measuring.tables import markdown

MODEL = "SmolLM2-135M-Instruct"
_ROWS = {"sst2": (16, 96), "rte": (8, 256), "boolq": (4, 384)}
"""Number of rows in a step, and largest number of tokens in a row, by task. Long rows are fewer."""
_PARTS = {
    "zero-shot": ("zero-shot",),
    "in-context": ("icl:8",),
    "first-order": ("fo:sensitive-c4", "fo:lora-8"),
    "masks": STATIC,
    "others": ("zo:lora-8", *REAL_PREFIX),
    "full": ("zo:full",),
}
_OF_16_BITS = frozenset({"full"})
_ONCE = frozenset({"zero-shot"})
"""Parts that do not depend on the seed, because the test items are the same for all seeds."""


def planned(model: Path) -> list[Unit]:
    """Return every sweep of the table. The most informative ones come first."""
    return [
        _unit(model, task, base, part)
        for part in _PARTS
        for base in ("bf16", "nf4")
        for task in _ROWS
        if base == "bf16" or part not in _OF_16_BITS
    ]


def _unit(model: Path, task: str, base: str, part: str) -> Unit:
    rows, tokens = _ROWS[task]
    choices = {
        "methods": list(_PARTS[part]),
        "bases": [base],
        "seeds": SEEDS[:1] if part in _ONCE else SEEDS,
        "density": DENSITY,
        "estimator": "spsa",
        "queries": 1,
        "zo_steps": 1000,
        "fo_steps": 100,
        "batch_size": rows,
        "max_tokens": tokens,
        "sizes": (1000, 128, 400),
        "evaluations": 5,
        # No search: the step size follows from the method's first gradients (docs/adr/0030).
        "trials": 1,
        "tuning_seeds": 1,
    }
    return Unit(stage="table", model=model, task=task, name=f"{task}-{base}-{part}", choices=choices)


def tables(results: Path) -> dict[str, str]:
    """Return the page's tables by their names in the template."""
    folder = results / "paper"
    records = read_records(folder)
    rows: dict[str, dict[str, str]] = {}
    guess = rows["guess"] = {"method": "the most frequent answer"}
    entries = lacking = 0
    for unit in planned(Path(MODEL)):
        (base,), seeds = unit.choices["bases"], len(unit.choices["seeds"])
        for method in unit.choices["methods"]:
            own = [r for r in records if (r["unit"], r["method"]) == (unit.name, method)]
            found, column = [record["accuracy"] for record in own], f"{unit.task}, {base}"
            rows.setdefault(method, {"method": method})[column] = _accuracy(found, seeds)
            if own:
                guess[column] = f"{own[0]['majority']:.1%}"
            entries, lacking = entries + 1, lacking + (len(found) < seeds)
    return {
        "accuracies": markdown(rows.values()),
        "claims": claims_table(folder),
        "lacking": f"{lacking} of the table's {entries} entries",
    }


def _accuracy(found: Sequence[float], seeds: int) -> str:
    progress = "" if len(found) == seeds else f"{len(found)} of {seeds} seeds"
    if not found:
        return progress
    spread = f", {min(found):.1%} to {max(found):.1%}" if len(found) > 1 else ""
    return f"{sum(found) / len(found):.1%}{spread}{progress and f' ({progress})'}"


def _named(folder: Path) -> Path:
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
    parser.add_argument("--part", choices=_PARTS, help="run only this part")
    parser.add_argument("--task", choices=_ROWS, help="run only this task")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="number of seeds")
    parser.add_argument("--minutes", type=float, help="begin no new cell after this time")
    options = parser.parse_args(arguments)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    data = folder_from_environment("PERMILLE_DATA")
    try:
        model = _named(model_folder(options.gguf, FOLDER))
        materials = Materials(
            models=(model,),
            tasks={
                task: {key: data / "tasks" / name for key, name in TASK_FILES[task].items()} for task in _ROWS
            },
            corpus=data / "text/c4_en/c4_sample.jsonl",
        )
        units = planned(model)
        describe(options.folder, units)
        for seeds in range(1, options.seeds + 1):
            for unit in units:
                part = unit.name.split("-", 2)[2]
                if options.part in (None, part) and options.task in (None, unit.task):
                    own = replace(unit, choices={**unit.choices, "seeds": unit.choices["seeds"][:seeds]})
                    path = options.folder / f"{unit.name}.jsonl"
                    run_sweep(own.sweep(materials), path, progress_until(end))
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except TimeIsUpError:
        print("the minutes are over; run the same command to continue", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
