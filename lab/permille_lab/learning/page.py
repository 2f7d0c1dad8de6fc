"""Tables of estimators.md and learning.md in docs/results, from finished cells."""

import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from permille_lab.learning.compare import STATE, TRAINED
from permille_lab.measuring.cells import Cells, Result, Settings
from permille_lab.measuring.tables import markdown

BASELINE = "spsa 8 x 2"
SAME, LORA = "the same values, AdamW", "LoRA, AdamW"
SHARES = (0.5, 0.75, 0.9, 0.95)
"""Shares of the loss reduction by `STATE`. They define the target losses to which all methods are timed."""

Points = list[dict[str, Any]]


def label(settings: Settings) -> str:
    """Return an estimator's name in tables: its kind, queries and rows."""
    name = f"{settings['estimator']} {settings['queries']} x {settings['batch_rows']}"
    # Older cells have directions that were scaled by the Fisher score.
    return f"{name}, scaled" if settings.get("scaling") else name


def loss_at(points: Points, axis: str, place: float) -> float:
    """Return the loss at a place on an axis such as `seconds`, interpolated linearly between points."""
    finite = [(point[axis], math.nan if point["loss"] is None else point["loss"]) for point in points]
    places, losses = zip(*finite, strict=True)
    return float(np.interp(place, places, losses))


def estimator_tables(results: Path) -> dict[str, str]:
    """Return the loss reduction of each contender compared with the baseline, over their common runs."""
    groups: dict[tuple[str, str, int], dict[str, Points]] = defaultdict(dict)
    for settings, result in Cells(results / "estimators.jsonl").of("estimators"):
        if "points" in result:
            at = settings["model"], settings["text"], settings["seed"]
            groups[at][label(settings)] = result["points"]
    rows = []
    for (model, text, _), contenders in groups.items():
        seconds = min(points[-1]["seconds"] for points in contenders.values())
        falls = {
            name: points[0]["loss"] - loss_at(points, "seconds", seconds)
            for name, points in contenders.items()
        }
        rows += [
            {"contender": name, "text": f"{model}, {text}", "fall": fall, "more": fall - falls[BASELINE]}
            for name, fall in falls.items()
            if BASELINE in falls
        ]
    frame = pd.DataFrame(rows)
    found = [
        {
            "contender": name,
            "runs": len(runs),
            f"more than `{BASELINE}`": f"{runs['more'].mean():+.3f}",
            "standard error": f"{runs['more'].sem():.3f}" if len(runs) > 1 else "",
            "ahead in": f"{(runs['more'] > 0).sum()} of {len(runs)}",
            "above its base in": str((~(runs["fall"] > 0)).sum()),
        }
        for name, runs in frame.groupby("contender", sort=False)
    ]
    found.sort(key=lambda row: -float(row[f"more than `{BASELINE}`"]))
    falls = frame.pivot_table(index="text", columns="contender", values="fall", aggfunc="mean")
    texts = falls.map(lambda fall: "" if math.isnan(fall) else f"{fall:.3f}").reset_index()
    return {"paired": markdown(found), "texts": markdown(texts)}


def learning_tables(results: Path) -> dict[str, str]:
    """Return the tables of learning.md by their names in the template."""
    cells = Cells(results / "learning.jsonl").of("learning")
    groups: dict[tuple[str, str, int], dict[str, Result]] = defaultdict(dict)
    for settings, result in cells:
        groups[settings["model"], settings["text"], settings["seed"]][settings["method"]] = result
    rows = []
    for (_, text, seed), found in groups.items():
        goals = _goals(found.get(STATE))
        for method, result in found.items():
            if method in TRAINED:
                continue
            points = result["points"]
            base, last = points[0]["loss"], points[-1]
            rows.append(
                {
                    "text": text + (f", seed {seed}" if seed else ""),
                    "method": method,
                    **{f"s to {100 * share:g} %": _reached(points, goal) for share, goal in goals.items()},
                    "base": f"{base:.3f}",
                    "end": f"{last['loss']:.3f}",
                    "lowest": f"{min(point['loss'] for point in points):.3f}",
                    "steps": last["step"],
                    "search, s": f"{result['search_s']:.0f}",
                    "peak, MB": f"{result['peak_bytes'] / 1e6:.0f}",
                    "bytes": result.get("bytes", ""),
                }
            )
    return {
        "times": markdown(rows),
        "targets": _targets(groups),
        "trained": _trained(groups),
    }


def _trained(groups: dict[tuple[str, str, int], dict[str, Result]]) -> str:
    """Return the table of sparse values and adapters of similar sizes."""
    rows = [
        {
            "text": text,
            "trained": "6 thousand values" if method == STATE else method,
            "numbers": f"{found[method]['k']:,}",
            "base": f"{points[0]['loss']:.3f}",
            "after 20": f"{loss_at(points, 'step', 20):.3f}",
            "end": f"{points[-1]['loss']:.3f}",
            "lowest": f"{_lowest(found[method]):.3f}",
            "s a step": f"{points[-1]['seconds'] / points[-1]['step']:.2f}",
            "peak, MB": f"{found[method]['peak_bytes'] / 1e6:.0f}",
            "state, bytes": found[method]["bytes"],
        }
        for (_, text, _), found in groups.items()
        for method in (STATE, *TRAINED)
        if method in found and found.keys() & TRAINED.keys()
        for points in [found[method]["points"]]
    ]
    return markdown(rows)


def _targets(groups: dict[tuple[str, str, int], dict[str, Result]]) -> str:
    """Return the table that compares training along the gradient with its goals."""
    own = [(found[STATE], found) for found in groups.values() if STATE in found]
    gaps = [_lowest(state) - _lowest(found[SAME]) for state, found in own if SAME in found]
    falls = [_fall(state) / _fall(found[SAME]) for state, found in own if SAME in found]
    times = []
    for state, found in own:
        if LORA in found:
            (goal,) = _goals(state, (0.95,)).values()
            times.append(_seconds(state["points"], goal) / _seconds(found[LORA]["points"], goal))
    logged = [r for found in groups.values() for name, r in found.items() if name.startswith("gradient")]
    rows = [
        (
            "ends above its base",
            f"{sum(_end(run) > run['points'][0]['loss'] for run in logged)} of {len(logged)}",
        ),
        (
            "begins again with a smaller rate",
            f"{sum(run['restarts'] > 0 for run in logged)} of {len(logged)}",
        ),
        ("above the lowest of AdamW on the same values, nats", _spread(gaps, "+.3f")),
        ("share of AdamW's fall on the same values", _spread(falls, ".1%")),
        ("seconds to 95 % of its fall, LoRA's being 1", _spread(times, ".1f")),
    ]
    return markdown(pd.DataFrame(rows, columns=["training along the gradient", "found"]))


def _spread(values: list[float], form: str) -> str:
    """Return mean, range and number of values as text, or empty text without values."""
    if not values:
        return ""
    mean, least, most = (format(f(values), form) for f in (np.mean, min, max))
    return f"{mean} ({least} to {most}; {len(values)})"


def _goals(state: Result | None, shares: tuple[float, ...] = SHARES) -> dict[float, float]:
    """Return the target loss for each share of the reduction by `STATE`. Empty if it was not run."""
    if state is None:
        return {}
    base = state["points"][0]["loss"]
    return {share: base - share * _fall(state) for share in shares}


def _lowest(result: Result) -> float:
    return float(min(point["loss"] for point in result["points"]))


def _end(result: Result) -> float:
    return float(result["points"][-1]["loss"])


def _fall(result: Result) -> float:
    return float(result["points"][0]["loss"]) - _lowest(result)


def _reached(points: Points, loss: float) -> str:
    seconds = _seconds(points, loss)
    return "not reached" if math.isinf(seconds) else f"{seconds:.1f}"


def _seconds(points: Points, loss: float) -> float:
    """Return the seconds until a loss was reached, interpolated. Infinity if it was not reached."""
    for before, point in pairwise([points[0], *points]):
        if point["loss"] <= loss:
            share = (before["loss"] - loss) / max(1e-12, before["loss"] - point["loss"])
            return float(before["seconds"] + share * (point["seconds"] - before["seconds"]))
    return math.inf
