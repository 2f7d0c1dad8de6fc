"""Tables of docs/results/evidence.md and rows of `verdicts.csv`, from the finished cells."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from permille_lab.evaluate.outcomes import Json
from permille_lab.evidence.claims import Row, Verdict, verdicts
from permille_lab.evidence.paper_claims import CLAIMS
from permille_lab.evidence.plan import (
    DENSITY,
    DYNAMIC,
    RANK_16,
    REAL_PREFIX,
    REFERENCES,
    SEGMENTS,
    STATIC,
    TEXT_BY_DENSITY,
    WITHOUT_MASK,
)
from permille_lab.evidence.records import by_density, by_scheme, by_steps, lacking, read_records
from permille_lab.measuring.tables import markdown
from permille_lab.tasks.examples import Task

LOOKS = {"queries-sensitive-c4": 2, "queries-lora-fa-8": 2}
"""Number of looks at claims. Two of the five seeds of these claims were added after a look at three."""

_ORDER = (
    *(name for name in REFERENCES if not name.startswith("fo:")),
    *(*STATIC, SEGMENTS, *DYNAMIC, *WITHOUT_MASK, *REAL_PREFIX, *RANK_16, *REFERENCES),
)
"""Order of a table's lines: untrained methods, masks, other sets, first order."""


def tables(results: Path) -> dict[str, str]:
    """Return the page's tables in Markdown, by their names in the template."""
    folder = results / "evidence"
    records = read_records(folder)
    missing = lacking(folder, records)
    return {
        "claims": _claims(_verdicts(records)),
        "methods": _methods([record for record in records if record["stage"] == "table"]),
        "densities": _by(
            [r for r in by_density(records) if r["method"] in TEXT_BY_DENSITY],
            "density",
            "density {:g}".format,
        ),
        "schemes": _by(by_scheme(records), "base", str),
        "steps": _by(by_steps(records), "zo_steps", "{} steps".format),
        "missing": "; ".join(
            f"`{stage}` of {model} on {task}: {done} of {planned} cells"
            for (stage, model, task), (done, planned) in missing.items()
        )
        or "nothing",
    }


def claims_table(folder: Path) -> str:
    """Return the table of verdicts on every claim, from the results of a folder."""
    return _claims(_verdicts(read_records(folder))) or "Nothing can be compared yet."


def verdict_rows(results: Path) -> str:
    """Return every comparison of every claim as CSV. The page's table of claims is its summary."""
    rows = []
    for row in _verdicts(read_records(results / "evidence")):
        if row.found is not None:
            low, high = row.interval or (np.nan, np.nan)
            rows.append(
                {
                    "claim": row.claim.key,
                    "model": row.model,
                    "density": row.density,
                    "outcome": f"{'loss' if row.by_loss else 'accuracy'} of {', '.join(row.found.tasks)}",
                    "verdict": row.verdict.value,
                    "effect": row.found.effect,
                    "low": low,
                    "high": high,
                    "texts": row.found.clusters,
                    "seeds": row.found.seeds,
                    "p": row.p_value,
                    "p_failing": row.p_failing,
                    "note": row.reason,
                }
            )
    return str(pd.DataFrame(rows).to_csv(index=False, float_format="%.4g"))


def _verdicts(records: Sequence[Json]) -> list[Row]:
    """Return the verdicts on runs of the usual length.

    Longer runs are left out: a task must count for accuracy at the number of steps of the compared methods.
    """
    usual = [record for record in records if record["stage"] != "longer"]
    return [row for row in verdicts(usual, looks=LOOKS) if row.found is not None]


def _claims(rows: Sequence[Row]) -> str:
    """Return a table with a line for each claim and a column for each model and task."""
    if not rows:
        return ""
    cells = [
        {"claim": row.claim.sentence, "where": f"{row.model}, {_task(row)}", "verdict": _short(row)}
        for row in rows
    ]
    places = dict.fromkeys(
        f"{row.model}, {_task(row)}"
        for row in sorted(rows, key=lambda row: (row.model, _task(row) != Task.TEXT, _task(row) != Task.SST2))
    )
    order = [claim.sentence for claim in CLAIMS]
    frame = pd.DataFrame(cells).pivot_table(
        index="claim", columns="where", values="verdict", aggfunc="; ".join, fill_value="", sort=False
    )
    return markdown(frame.reindex([sentence for sentence in order if sentence in frame.index])[list(places)])


def _task(row: Row) -> str:
    return ", ".join(row.found.tasks) if row.found is not None else ""


def _short(row: Row) -> str:
    assert row.found is not None
    effect = f"{row.found.effect:+.3f}" if row.by_loss else f"{100 * row.found.effect:+.1f} points"
    verdict = "?" if row.verdict is Verdict.UNDECIDED else f"**{row.verdict}**"
    return f"{verdict} {effect}{'' if row.density == DENSITY else f' at {row.density:g}'}"


def _methods(records: Sequence[Json]) -> str:
    """Return the losses of methods on people's text and on SST-2, with mean and deviation over seeds."""
    left_out = (*RANK_16, "zo:lora-fa-8", "zo:prefix-5", "icl:8")
    kept = [r for r in records if r["task"] in (Task.TEXT, Task.SST2) and r["method"] not in left_out]
    return _pivoted(kept, lambda record: f"{record['model']}, {record['task']}", by_task=False)


def _by(records: Sequence[Json], setting: str, named: Callable[..., str]) -> str:
    """Return the losses of methods by a setting (density, steps or base), for all models and tasks."""
    ordered = sorted(records, key=lambda record: record[setting]) if setting != "base" else records
    return _pivoted(ordered, lambda record: named(record[setting]), by_task=True)


def _pivoted(records: Sequence[Json], column: Callable[[Json], str], *, by_task: bool) -> str:
    rows = []
    for record in records:
        at = "" if record["density"] == DENSITY or by_task else f" at {record['density']:g}"
        over = "" if record["base"] == "bf16" or by_task else f" over {record['base']}"
        place = f"{record['model']}, {record['task']}: " if by_task else ""
        rows.append(
            {
                "method": f"{place}{record['method']}{over}{at}",
                "place": (record["model"], record["task"]) if by_task else (),
                "base": "" if by_task else record["base"],
                "at": at,
                "order": _ORDER.index(record["method"]) if record["method"] in _ORDER else len(_ORDER),
                "column": column(record),
                "loss": record["loss"],
            }
        )
    if not rows:
        return "Nothing yet."
    frame = pd.DataFrame(rows)
    names = frame.sort_values(["place", "at", "base", "order"], kind="stable")["method"].unique()
    found = frame.pivot_table(
        index="method", columns="column", values="loss", aggfunc=_spread, fill_value="", sort=False
    )
    return markdown(found.reindex(names)[frame["column"].unique()].rename_axis(index="method"))


def _spread(losses: "pd.Series[float]") -> str:
    deviation = f" ± {losses.std(ddof=1):.3f}" if losses.nunique() > 1 else ""
    return f"{losses.mean():.3f}{deviation}"
