"""Tables of docs/results/federation.md, from finished cells."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from scipy import stats

from permille_lab.federation.computation import CONTENDERS, passes_to
from permille_lab.measuring.cells import Cells, Result, Settings
from permille_lab.measuring.tables import markdown

_BASE = "base"
_PAIRS = (
    ("pooled", _BASE),
    ("own", _BASE),
    ("pooled, then own", "own"),
    ("pooled, then own", "pooled"),
    ("pooled", "first order, pooled"),
    ("pooled, then own", "first order, pooled, then own"),
)


def tables(results: Path) -> dict[str, str]:
    """Return the tables by their names in the template."""
    cells = Cells(results / "federation.jsonl")
    return {
        "methods": markdown(_methods(cells.of("methods"))),
        "directions": markdown(_directions(cells.of("directions"))),
        "people": markdown(_people(cells.of("people"))),
        "attackers": markdown(_attackers(cells.of("attackers"))),
        "privacy": markdown(_privacy(cells.of("privacy"))),
        "computation": markdown(_computation(cells)) or "Not measured yet.",
    }


def interval(gains: Sequence[float]) -> str:
    """Return the mean and its 95 % interval as text, by Student's t over devices."""
    values = np.array(gains)
    reach = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)) if len(values) > 1 else 0.0
    return f"{values.mean():+.3f} ({values.mean() - reach:+.3f} to {values.mean() + reach:+.3f})"


def _methods(cells: list[tuple[Settings, Result]]) -> list[dict[str, str]]:
    def method(cell: tuple[Settings, Result]) -> str:
        return str(cell[0]["method"])

    rows = []
    for name, group in groupby(cells, method):
        found = list(group)
        _, first = found[0]
        row = {"method": name}
        row |= {settings["split"]: interval(result["gains"]) for settings, result in found}
        row |= {
            "row passes": f"{first['row_passes']:,.0f}",
            "kB up": f"{np.mean([result['up'] for _, result in found]) / 1e3:.1f}",
            "kB down": f"{np.mean([result['down'] for _, result in found]) / 1e3:.1f}",
            "s a part": f"{np.mean([result['seconds'] for _, result in found]):.2f}",
        }
        rows.append(row)
    return rows


def _directions(cells: list[tuple[Settings, Result]]) -> list[dict[str, str]]:
    found: dict[str, dict[str, list[float]]] = {}
    for settings, result in cells:
        found.setdefault(settings["method"], {}).setdefault(settings["split"], []).append(
            float(np.mean(result["gains"]))
        )
    return [
        {"directions a step": name}
        | {split: f"{np.mean(gains):+.3f} ({len(gains)} seeds)" for split, gains in of_split.items()}
        for name, of_split in found.items()
    ]


def _people(cells: list[tuple[Settings, Result]]) -> list[dict[str, str]]:
    rows = []
    for _, result in cells:
        gains = {name: np.array(found) for name, found in result["gains"].items()}
        gains[_BASE] = np.zeros_like(gains["own"])
        for first, second in _PAIRS:
            more = gains[first] - gains[second]
            rows.append(
                {
                    "state": first,
                    "against": second,
                    "takes off more": interval(more.tolist()),
                    "better for": f"{(more > 0).sum()} of {len(more)}",
                    "p": f"{stats.wilcoxon(more).pvalue:.2g}",
                }
            )
    return rows


def _attackers(cells: list[tuple[Settings, Result]]) -> list[dict[str, str]]:
    rows: dict[str, dict[str, str]] = {}
    for settings, result in cells:
        row = rows.setdefault(settings["attack"], {"attack of 20 %": settings["attack"]})
        row[settings["rule"]] = f"{np.mean(result['gains']):+.3f}"
    return list(rows.values())


def _privacy(cells: list[tuple[Settings, Result]]) -> list[dict[str, str]]:
    rows: dict[int, dict[str, str]] = {}
    for settings, result in cells:
        z = settings["noise_hundredths"] / 100
        spent = (
            "no noise" if result["dp_epsilon"] is None else f"z = {z:g}, epsilon {result['dp_epsilon']:.1f}"
        )
        row = rows.setdefault(settings["cohort"], {"devices": str(settings["cohort"])})
        row[spent] = interval(result["gains"])
    return list(rows.values())


def _computation(cells: Cells) -> list[dict[str, str]]:
    """Return a row for each method and division, with the computation to the best gain of each rival."""
    rates = cells.of("computation rate")
    edges = {(settings["method"], settings["split"]): found["on_edge"] for settings, found in rates}
    curves: dict[tuple[str, str], dict[int, Result]] = {}
    for settings, result in cells.of("computation"):
        curves.setdefault((settings["method"], settings["split"]), {})[settings["seed"]] = result
    return [
        {
            "method": method,
            "text": split,
            "rate": f"{own[min(own)]['rate']:.3g}{', on the edge' if edges.get((method, split)) else ''}",
            "row passes": f"{np.mean([found['points'][-1][0] for found in own.values()]):,.0f}",
            "best gain": f"{np.mean([_best(found) for found in own.values()]):+.2f}",
            **{
                f"{rival}'s passes over its own, to {rival}'s best gain": _saving(
                    own, curves.get((rival, split), {})
                )
                for rival in CONTENDERS
                if not rival.startswith("FedSPZO") and method.startswith("FedSPZO")
            },
            "seeds": str(len(own)),
        }
        for (method, split), own in curves.items()
    ]


def _best(found: Result) -> float:
    return float(max(gain for _, gain in found["points"]))


def _saving(own: dict[int, Result], rivals: dict[int, Result]) -> str:
    """Return the rival's passes to its best gain, over those that the method needs for this gain."""
    told = []
    for seed in own.keys() & rivals.keys():
        wanted, points = _best(rivals[seed]), own[seed]["points"]
        theirs = passes_to(rivals[seed]["points"], wanted)
        mine = passes_to(points, wanted)
        assert theirs is not None  # the rival has its own best gain
        told.append("not reached" if mine is None else f"{theirs / mine:.1f}")
    return ", ".join(told)
