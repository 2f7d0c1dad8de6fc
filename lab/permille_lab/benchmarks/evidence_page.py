"""Writes `evidence.md`, `evidence.json` and the figures, from whatever the evidence's folder holds."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from permille.errors import InputError
from permille.files import write_atomic
from permille_lab.benchmarks.cells import Result, Settings
from permille_lab.benchmarks.evidence_archive import FOLDER as ARCHIVES
from permille_lab.benchmarks.evidence_pictures import (
    FIGURES,
    Picture,
    coverage_pictures,
    fraction_pictures,
    memory_pictures,
    step_pictures,
    transfer_pictures,
)
from permille_lab.benchmarks.evidence_plan import LONGER, Unit
from permille_lab.benchmarks.evidence_prior import Learned
from permille_lab.benchmarks.evidence_records import (
    by_density,
    by_scheme,
    by_steps,
    identity,
    progress,
    read_records,
    read_tunings,
    summary,
    unfinished_claims,
)
from permille_lab.benchmarks.evidence_tables import (
    begun_anew,
    budget_table,
    cut_share,
    method_table,
    progress_list,
    setting_table,
    short_table,
    turn_table,
    verdict_table,
)
from permille_lab.evaluate.claims import verdicts
from permille_lab.evaluate.outcomes import Json

DATA, PAGE, FOLDER = "evidence.json", "evidence.md", "figures"
_COMMAND = "python -m permille_lab.benchmarks.evidence"

LOOKS = {"queries-sensitive-c4": 2, "queries-lora-fa-8": 2}
LOOKED_AT = frozenset({"stories260K-hf", "reference-7M"})
"""Two of the five seeds of these claims were measured after three had been looked at, of these models
(docs/adr/0120). Others have five from the beginning."""

_HEAD = """# Evidence: the papers' comparisons, repeated

Made by `make evidence` (`{command}`) from the models and the task files that it is given. This page is
written from the finished cells alone, in whatever state the run is ({done} of {planned} cells: see *Not
measured yet*); the data behind every number: `{data}`, and item by item, with the curves, `{archives}/`.
`make bench-quantizers` measures perplexity and bytes of every 4-bit scheme (`quantizers.md`).
"""

_SHORT = """## In short

What each claim comes to, by model: on people's text (`text`), and on the other tasks, of which a loss says
for the most part how soon a method knows the form of an answer, unless it is shown that training reads the
prompt (*What tasks can tell*). Positive: the first side's loss is lower, in nats a token. A question mark:
undecided. Density 0.001 where none is named; intervals, seeds and p are under *Verdicts*.
"""

_BUDGETS = """## How much was trained

The papers train for ten thousand steps and more; everything here is said of these budgets. *Best at the last
evaluation*: in so many of the trained cells longer training might have gone on. First order on the values of
a mask is what it reaches in these steps, not a ceiling.
"""

_HOW = """## How it is compared

Every trained method starts with the same number of step sizes on one logarithmic grid,
extended while the best is on its edge, by four at most (*edge*: the best stayed there). On tasks without
passages, at density 0.001 and where the curve is flat, the best of one tuning seed and its neighbours are
tried with two more, and the median chooses ({tuned}). Tuning seeds are no reporting seeds; test items are the
same for every seed and chose nothing. A run whose validation loss rose above the base's begins anew with the
next smaller step size, at most twice, and its best attempt counts, much as on a device (which halves its
steps); the search compares what is left after that. Sets that are selected again go back to the best of each
segment instead. Zeroth-order steps take exact directional derivatives ({queries} a step unless a table says
otherwise). Searches of every cell are in the data.
"""

_LOOKED = """Of the queries' five seeds
two were measured after a look at three, of {models}: p of these claims is doubled. """

_LONGER = f", {LONGER} times the steps"

_VERDICTS = """## Verdicts

Effects are differences in accuracy on tasks that tuned first-order training can do at this size (5 points
above majority and zero-shot, p < 0.01), else in the loss of the right answer (positive: the first method's is
lower); language modelling (`text`) is judged by its loss, in rows of its own. Intervals and p-values take
items and seeds as drawn, and the step size as the search chose it. p is of what would make the claim hold,
adjusted (Holm) for all rows of the claim; that it fails is tested apart and adjusted alike, and where it does
that p is shown; intervals are not adjusted. A claim holds over all rows where every one does (*so far* while
cells of it are missing: rows to come would count in the adjustment) and fails where one does: read the rows.
A row of fewer seeds than an equality wants does not count where another has them. {looks}Margins: 1 point,
0.01 nats. *Undecided* says what is needed; equality is never concluded from methods that learned nothing. The
work of queries is that of one attempt.
"""


def write_page(
    folder: Path,
    output: Path,
    planned: Sequence[Unit],
    models: Mapping[str, Path],
    *,
    wanted: Sequence[Unit],
    cells: Sequence[tuple[str, Settings, Result]],
    waiting: Mapping[str, str],
    priors: Mapping[tuple[str, str], float],
    known: Mapping[tuple[str, str, str], Learned],
    queries: int,
) -> None:
    """Write page, data and figures.

    Args:
        folder: with `sweeps`.
        planned: every sweep that the evidence may consist of: all that there is of these is shown.
        models: folders by name.
        wanted: those that the evidence lacks while they are not finished.
        cells: of gradients, steps and memory.
        waiting: stages that cannot be planned yet, with the reason.
        priors: of a model's name and a task: the loss of the best guess that is the same for every prompt.
        known: what first-order training shows, likewise, with its stage.
        queries: directions a step.
    """
    names = {unit.name for unit in planned}
    records = [record for record in read_records(folder) if record["unit"] in names]
    pictures = [
        *fraction_pictures(records, models),
        *coverage_pictures(_of(cells, "coverage")),
        *transfer_pictures(_of(cells, "transfer")),
        *step_pictures(_of(cells, "steps"), records),
        *memory_pictures(_of(cells, "memory")),
    ]
    drawn = {picture.key for picture in pictures}
    missing = dict(waiting) | {
        f"figure `{key}`": f"{what}: no data yet" for key, what in FIGURES.items() if key not in drawn
    }
    looked_at = sorted(LOOKED_AT & {record["model"] for record in records})
    looks = LOOKS if looked_at else {}
    rows = verdicts(_of_the_table(records), looks=looks)
    stages = progress(wanted, records)
    done, total = (sum(getattr(stage, key) for stage in stages) for key in ("done", "planned"))
    lines = [
        _HEAD.format(command=_COMMAND, data=DATA, archives=ARCHIVES, done=done, planned=total),
        _SHORT,
        *short_table(rows),
        "",
        _BUDGETS,
        *budget_table(records),
        "",
        _HOW.format(queries=queries, tuned=_tuned(records)),
        _VERDICTS.format(looks=_LOOKED.format(models=" and ".join(looked_at)) if looked_at else ""),
        *verdict_table(rows, unfinished_claims(wanted, records)),
        "",
        *_known(known, records),
        *_tables(records, priors),
        "## Not measured yet",
        "",
        *progress_list(stages, missing),
        "",
        *_figures(pictures),
    ]
    (output / FOLDER).mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        write_atomic(output / FOLDER / f"{picture.name}.png", picture.png)
    data = {
        "records": summary(records),
        "searches": [search for search in read_tunings(folder) if search["unit"] in names],
        "cells": [{"figure": figure, "settings": at, "result": found} for figure, at, found in cells],
    }
    write_atomic(output / DATA, _json(data).encode())
    write_atomic(output / PAGE, ("\n".join(lines).rstrip() + "\n").encode())


@dataclass(frozen=True, slots=True)
class Kept:
    """What a page shows: records, and figures' cells."""

    records: list[Json]
    cells: list[tuple[str, Settings, Result]]


def kept(output: Path) -> Kept:
    """What the page there shows; nothing where there is none.

    Raises:
        InputError: its data are damaged.
    """
    path = output / DATA
    if not path.exists():
        return Kept([], [])
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        records = [record | {} for record in found["records"]]
        for record in records:
            identity(record)
        cells = [(cell["figure"], dict(cell["settings"]), dict(cell["result"])) for cell in found["cells"]]
    except (ValueError, KeyError, TypeError) as exc:
        raise InputError(
            f"expected the data of a page in {path}, got {exc!r}: remove it, or choose another --output"
        ) from exc
    return Kept(records, cells)


def _tuned(records: Sequence[Json]) -> str:
    """How many cells that holds for."""
    trained = [record for record in records if record["step_factor"] is not None]
    several = sum(record["tuning_seeds"] > 1 for record in trained)
    return f"{several} of {len(trained)} trained cells; the others have the one seed's choice"


def _known(known: Mapping[tuple[str, str, str], Learned], records: Sequence[Json]) -> Iterable[str]:
    if not known:
        return
    yield from (
        "## What tasks can tell at this size",
        "",
        "Losses fall by nats as soon as a method knows what an answer looks like. That first-order training "
        "reads the prompt as well, in the steps that it has, is shown where its loss is below that of the "
        "best guess that is the same for every prompt, or where it is right more often than such a guess, "
        "answer by answer (p < 0.005 for either; items and seeds as drawn, its best method by validation; "
        "each line alone: nothing is corrected for their number). "
        "Training weighs tokens and the loss answers, so one that is blind may end above the guess. Where "
        "answers differ by example, it must be right more often than the more frequent place. Where nothing "
        "is shown, what differs between methods is for the most part how soon they know the form: the first "
        "task tells that of all methods, of others the references are measured, and what was before this "
        "was known.",
        "",
        *(
            f"- {task}, {model}{_lost(records, model, task)}{_LONGER if stage == 'longer' else ''}: {found}."
            for (model, task, stage), found in known.items()
        ),
        "",
    )


def _lost(records: Sequence[Json], model: str, task: str) -> str:
    """That prompts were cut, which may be why nothing is shown."""
    own = [record for record in records if (record["model"], record["task"]) == (model, task)]
    share = cut_share(own)
    return f" ({100 * share:.0f} % of the prompts lost their front)" if share else ""


def _of_the_table(records: Sequence[Json]) -> list[Json]:
    """Without longer runs: whether a task counts is said of the steps that methods have."""
    return [record for record in records if record["stage"] != "longer"]


def _tables(records: Sequence[Json], priors: Mapping[tuple[str, str], float]) -> Iterable[str]:
    yield from (
        "## Where claims turn",
        "",
        "The same comparisons by density: three seeds, one tuning seed, p adjusted by claim over the rows of "
        "this table. At a model's flat density the verdicts above have five seeds and three tuning seeds.",
        "",
    )
    yield from (*turn_table(verdicts(_of_the_table(records), stages=("fractions",))), "")
    yield from (
        "## Methods and tasks (table 1)",
        "",
        "Accuracy in percent, mean and deviation over three seeds where a cell does not say more; in "
        "brackets the loss of the right answer, nats a token. Tasks in *italics* do not count for accuracy; "
        "of those with a question mark it is not known yet. Ranks are over the tasks of which all methods "
        "have three seeds, and over the seeds that all have, so they may differ from the means shown. A "
        "method without a mask stands at 0.001. *Cut*: test prompts longer than `max_tokens`, which lose "
        "their front (a text its end). *Shots fitted*: solved examples that found room before a question. "
        "*Prior*: the least loss of a guess that is the same for every prompt.",
        "",
    )
    tables = [record for record in records if record["stage"] in ("table", "flat")]
    for model, density in sorted({(record["model"], record["density"]) for record in tables}):
        own = [r for r in tables if (r["model"], r["density"]) == (model, density)]
        yield from (f"### {model}, density {density:g}", "")
        yield from (
            *method_table(own, [r for r in _of_the_table(records) if r["model"] == model], priors),
            "",
        )
    settings = (
        ("queries", "queries", "q =", "Queries against batch at constant work (P-RGE, table 2)"),
        (
            "fractions",
            "density",
            "density",
            "Every mask by density, and first order on the same values (one tuning seed; 0.001: the first "
            "three seeds of table 1, three tuning seeds)",
        ),
        ("schemes", "base", "", "Sensitive weights over every 4-bit scheme"),
        (
            "longer",
            "zo_steps",
            "steps",
            "Longer runs (one tuning seed and twice the evaluations; the fewest steps of a model: the first "
            "three seeds of table 1, with its search)",
        ),
    )
    with_table = {"fractions": by_density, "schemes": by_scheme, "longer": by_steps}
    for stage, setting, heading, title in settings:
        own = (
            with_table[stage](records) if stage in with_table else [r for r in records if r["stage"] == stage]
        )
        if own:
            yield from (f"## {title}", "", *setting_table(own, setting, heading), "")
            if stage == "queries":
                yield from (f"Began anew: {begun_anew(own, setting, heading)}.", "")
            if stage == "longer":
                longer = [record for record in records if record["stage"] == stage]
                untrained = [record for record in records if record["method"] == "zero-shot"]
                rows = verdicts([*longer, *untrained], stages=(stage,))
                yield from (*turn_table(rows, "No claim has both sides yet."), "")


def _figures(pictures: Sequence[Picture]) -> Iterable[str]:
    if pictures:
        yield from ("## Figures", "")
    for picture in pictures:
        yield f"![{FIGURES[picture.key]}]({FOLDER}/{picture.name}.png)"
        yield from ("", f"{picture.caption} `{_COMMAND} --stage {picture.stage}`, data in `{DATA}`.", "")


def _of(cells: Sequence[tuple[str, Settings, Result]], figure: str) -> list[tuple[Settings, Result]]:
    return [(settings, result) for name, settings, result in cells if name == figure]


def _json(data: Mapping[str, Sequence[object]]) -> str:
    """One record a line: a change of one is a change of a line."""
    parts = [
        f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        for key, rows in data.items()
    ]
    return "{" + ",\n".join(parts) + "}\n"
