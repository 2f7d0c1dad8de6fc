"""Tables of docs/results/paper.md, from the finished cells.

Only tuned cells give verdicts. A cell is tuned if its step factor was searched (stage `tuned`), and the best
factor was not on the edge of the grid. Older cells have the stage `untuned` and are only shown.
"""

from collections.abc import Sequence
from pathlib import Path

from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.results import read_results
from permille_lab.evidence.claims import Row, verdicts
from permille_lab.evidence.coverage import coverage_tables
from permille_lab.evidence.paper import MODEL, planned
from permille_lab.evidence.paper_claims import Claim, Relation, Side
from permille_lab.evidence.records import read_records
from permille_lab.measuring.tables import markdown

_SENSITIVE = "zo:sensitive-c4"
_RIVALS = {
    "zo:random": "random ones",
    "zo:outliers": "the largest ones",
    "zo:lora-8": "LoRA of rank 8",
}
CLAIMS = (
    *(
        Claim(
            key=f"{rival}, {base}",
            sentence=f"sensitive weights beat {name}, {base}",
            relation=Relation.BETTER,
            first=Side(method=_SENSITIVE, four_bit=base == "nf4", queries=1),
            second=Side(method=rival, four_bit=base == "nf4"),
        )
        for base in ("nf4", "bf16")
        for rival, name in _RIVALS.items()
    ),
    *(
        Claim(
            key=f"zo:sensitive-task, {base}",
            sentence=f"weights chosen on C4 are as good as those chosen on the task, {base}",
            relation=Relation.WITHIN,
            first=Side(method=_SENSITIVE, four_bit=base == "nf4", queries=1),
            second=Side(method="zo:sensitive-task", four_bit=base == "nf4"),
        )
        for base in ("nf4", "bf16")
    ),
    Claim(
        key="queries, nf4",
        sentence="16 directions of one row beat one direction of eight rows, nf4",
        relation=Relation.BETTER,
        first=Side(method=_SENSITIVE, four_bit=True, queries=16),
        second=Side(method=_SENSITIVE, four_bit=True, queries=1),
    ),
)


def tables(results: Path) -> dict[str, str]:
    """Return the page's tables by their names in the template."""
    folder = results / "paper"
    records = read_records(folder)
    compared = verdict_rows(records)
    decided = [row for row in compared if any(told.startswith(("holds", "fails")) for told in row.values())]
    return {
        "verdicts": markdown(compared) or "No comparison has cells of both methods yet.",
        "decided": f"{len(decided)} of {len(CLAIMS)}",
        "tuned": markdown(_tuned(records)) or "No tuned run is finished.",
        "searches": markdown(_searches(folder)) or "No search is finished.",
        "references": markdown(_plain(records, "references")),
        "untuned": markdown(_plain(records, "untuned")),
        "lacking": _lacking(records),
        **coverage_tables(folder),
    }


def verdict_rows(records: Sequence[Json]) -> list[dict[str, str]]:
    """Return a row for each claim with tuned cells of both methods, with verdicts by accuracy and by loss."""
    kept = [record for record in records if record["stage"] != "tuned" or not record["on_edge"]]
    told: dict[str, dict[str, str]] = {}
    for losses in (False, True):
        for row in verdicts(kept, CLAIMS, stages=("tuned",), losses=losses):
            if row.model and row.by_loss is losses:
                own = told.setdefault(row.claim.key, {"claim of the paper": row.claim.sentence})
                own["by loss, nats" if losses else "by accuracy, points"] = _verdict(row)
    return list(told.values())


def _verdict(row: Row) -> str:
    """Return the verdict and the advantage of the first method, or the reason why there is none."""
    if row.found is None or row.interval is None or row.p_value is None:
        return f"open: {row.reason}"
    factor, form = (1, "+.2f") if row.by_loss else (100, "+.1f")
    effect, low, high = (format(factor * each, form) for each in (row.found.effect, *row.interval))
    return f"{row.verdict}: {effect} ({low} to {high})"


def _tuned(records: Sequence[Json]) -> list[dict[str, str]]:
    rows = []
    for unit in planned(Path(MODEL)):
        for method in unit.choices["methods"]:
            own = [r for r in records if (r["unit"], r["method"], r["stage"]) == (unit.name, method, "tuned")]
            if own:
                edge = ", on the grid's edge" if any(record["on_edge"] for record in own) else ""
                rows.append(
                    {
                        "method": _named(method, own[0]["queries"]),
                        "task": f"{unit.task}, {own[0]['base']}",
                        "step factor": f"{own[0]['tuned_step_factor']:g}{edge}",
                        "seeds": str(len(own)),
                        **_scores(own),
                    }
                )
    return rows


def _searches(folder: Path) -> list[dict[str, str]]:
    """Return the validation losses of each search, by step factor."""
    searches: list[tuple[dict[str, str], dict[float, float | None]]] = []
    for unit in planned(Path(MODEL)):
        path = folder / f"{unit.name}.jsonl"
        found = read_results(path).tunings.values() if unit.stage == "tuned" and path.exists() else ()
        middle, factor = unit.choices.get("grid_middle", 1.0), unit.choices.get("grid_factor", 1.0)
        for tuning in found:
            _, base, method, task = tuning["key"].split("/")
            losses = {middle * factor ** int(power): loss for power, loss in tuning["losses"].items()}
            method = _named(method, unit.choices["queries"])
            searches.append(({"method": method, "task": f"{task}, {base}"}, losses))
    factors = sorted({factor for _, losses in searches for factor in losses})
    return [
        own | {f"{each:g}": "" if losses.get(each) is None else f"{losses[each]:.2f}" for each in factors}
        for own, losses in searches
    ]


def _named(method: str, queries: int) -> str:
    return method if queries == 1 else f"{method}, {queries} directions"


def _plain(records: Sequence[Json], stage: str) -> list[dict[str, str]]:
    chosen = [record for record in records if record["stage"] == stage]
    keys = dict.fromkeys((record["method"], record["task"], record["base"]) for record in chosen)
    return [
        {
            "method": method,
            "task": f"{task}, {base}",
            **_scores([r for r in chosen if (r["method"], r["task"], r["base"]) == (method, task, base)]),
        }
        for method, task, base in sorted(keys, key=lambda key: (key[1] != "sst2", key[1], key[2], key[0]))
    ]


def _scores(records: Sequence[Json]) -> dict[str, str]:
    return {
        "right": _spread([record["accuracy"] for record in records], ".1%"),
        "loss": _spread([record["loss"] for record in records], ".2f"),
        "always the same answer": f"{records[0]['majority']:.1%}",
    }


def _spread(found: Sequence[float], form: str) -> str:
    """Return the mean, and the range over several seeds."""
    told = f"{sum(found) / len(found):{form}}"
    return told if len(found) == 1 else f"{told} ({min(found):{form}} to {max(found):{form}})"


def _lacking(records: Sequence[Json]) -> str:
    """Return the number of planned runs that are missing, by part."""
    done = [(record["unit"], record["method"], record["seed"]) for record in records]
    wanted = [
        (unit.name, method, seed)
        for unit in planned(Path(MODEL))
        for method in unit.choices["methods"]
        for seed in unit.choices["seeds"]
    ]
    return f"{len(set(wanted) - set(done))} of {len(wanted)}"
