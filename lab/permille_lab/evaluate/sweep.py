"""Run a sweep cell by cell. Each trial and each result is durable before the next one begins.

A killed sweep continues after the last complete line of its results file (`results.py`). A folder beside that
file holds the states of the runs of the unfinished cell (`unfinished.py`). If the input of a cell is wrong,
such as a damaged model, the other cells still run. The error is reported at the end.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from permille.errors import InputError
from permille_lab.evaluate.cells import Bench
from permille_lab.evaluate.methods import Order
from permille_lab.evaluate.outcomes import Cell, Json
from permille_lab.evaluate.results import Results, alone, digests, open_results
from permille_lab.evaluate.specification import Sweep
from permille_lab.evaluate.tuning import Trial, tune, tuning_seed

_TOLD = 3
"""Largest number of reasons in the message of `CellsFailedError`. Further reasons are counted."""


class CellsFailedError(InputError):
    """Some cells could not be measured. The others are done and kept.

    Attributes:
        records: records of the measured cells, in the order of `cells_of`.
        reasons: keys of the failed cells, by reason.
    """

    def __init__(self, failed: Mapping[str, InputError], records: list[Json]) -> None:
        self.records = records
        self.reasons: dict[str, list[str]] = {}
        for key, error in failed.items():
            self.reasons.setdefault(str(error), []).append(key)
        told = [f"{keys[0]}{_and_more(len(keys) - 1)}: {reason}" for reason, keys in self.reasons.items()]
        left = f"; and {len(told) - _TOLD} reasons more" if len(told) > _TOLD else ""
        super().__init__(
            f"expected all of {len(failed) + len(records)} cells, got {len(records)}, which are kept; "
            f"{'; '.join(told[:_TOLD])}{left}"
        )


def _and_more(count: int) -> str:
    return f" and {count} more" if count else ""


Progress = Callable[[int, int, str], None]
"""Callback with the number of done cells, the number of all cells, and the next cell or trial.

If it raises, the sweep stops there. But an `InputError` before a trial counts as an error of the cell.
"""


def cells_of(sweep: Sweep) -> list[Cell]:
    """Return all cells. Cells that share a tuning follow each other."""
    return [
        Cell(model=model, base=base, method=method, task=task, seed=seed)
        for model in sweep.models
        for base in sweep.bases
        for task in sweep.tasks
        for method in sweep.methods
        for seed in sweep.seeds
    ]


def run_sweep(sweep: Sweep, results: Path, progress: Progress) -> list[Json]:
    """Run the cells that the results file lacks. Return all records, in the order of `cells_of`.

    Raises:
        InputError: the results file is of another sweep or damaged before its last line, or a task file or
            the corpus is unusable (see `Bench.read`).
        CellsFailedError: the input of some cells is wrong. The others are done and kept.
        RetryableError: another process runs this sweep.
    """
    with alone(results):
        return _run_missing(sweep, results, progress)


def _run_missing(sweep: Sweep, results: Path, progress: Progress) -> list[Json]:
    done = open_results(sweep, results)
    unfinished = results.with_suffix(".unfinished")
    bench = Bench(sweep, unfinished / digests(sweep)[0][-16:])
    with done.bad_rows_of(bench):
        bench.read()
    cells = cells_of(sweep)
    failed: dict[str, InputError] = {}
    for number, cell in enumerate(cells):
        tell = partial(progress, number, len(cells))
        tell(cell.key)
        if cell.key not in done.cells:
            try:
                record = _run(bench, cell, done, tell)
            except InputError as exc:
                failed[cell.key] = exc
            else:
                done.append({"kind": "cell", "key": cell.key, **record})
                shutil.rmtree(unfinished, ignore_errors=True)
    progress(len(cells), len(cells), "")
    records = [done.cells[cell.key] for cell in cells if cell.key not in failed]
    if failed:
        raise CellsFailedError(failed, records)
    return records


def _run(bench: Bench, cell: Cell, done: Results, tell: Callable[[str], None]) -> Json:
    """Return the record of a cell. Bad rows are written to the file before the trial or the record."""
    order, factor, on_edge = cell.method.order, None, False
    if order is not None and bench.sweep.trials == 1:
        factor = 1.0  # a single trial would choose nothing and cost as much as the cell
    elif order is not None:
        if cell.tuning_key not in done.tunings:
            _tune(bench, cell, order, done, tell)
        tuning = done.tunings[cell.tuning_key]
        factor, on_edge = tuning["step_factor"], tuning["on_edge"]
    with done.bad_rows_of(bench):
        record = bench.run(cell, cell.seed, factor).record()
    return record | {"tuned_step_factor": factor, "on_edge": on_edge}


def _tune(bench: Bench, cell: Cell, order: Order, done: Results, tell: Callable[[str], None]) -> None:
    """Search the step factor of cells that share a tuning. Trials in the results file are not repeated."""

    def trial(seed: int, step_factor: float) -> Trial:
        key = f"{cell.tuning_key}/{seed}/{step_factor:.6g}"
        if key not in done.trials:
            tell(f"{cell.key}: trial of step factor {step_factor:.3g}, seed {seed}")
            with done.bad_rows_of(bench):
                found = bench.trial(cell, order, seed, step_factor)
            done.append({"kind": "trial", "key": key, "loss": _finite(found.loss), "rose": found.rose})
        known = done.trials[key]
        return Trial(loss=math.nan if known["loss"] is None else known["loss"], rose=known["rose"])

    seed = tuning_seed(cell.seed)
    tuned = tune(
        *(partial(trial, seed + number) for number in range(bench.sweep.tuning_seeds)),
        trials=bench.sweep.trials,
        middle=bench.sweep.grid_middle,
        factor=bench.sweep.grid_factor,
    )
    done.append(
        {
            "kind": "tuning",
            "key": cell.tuning_key,
            "seed": seed,
            "step_factor": tuned.step_factor,
            "losses": _by_power(tuned.losses),
            "medians": _by_power(tuned.medians),
            "runs": [
                {str(power): [_finite(trial.loss), trial.rose] for power, trial in sorted(of_seed.items())}
                for of_seed in tuned.runs
            ],
            "on_edge": tuned.on_edge,
        }
    )


def _by_power(losses: Mapping[int, float]) -> dict[str, float | None]:
    return {str(power): _finite(loss) for power, loss in sorted(losses.items())}


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
