"""The tables of the pages on estimators and on time to a loss, from finished cells."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from permille_lab.learning.compare import FORWARD_ONLY
from permille_lab.measuring.cells import Cells, Result, Settings

BASELINE = "spsa 8 x 2"
SHARES = (0.5, 0.75, 0.95)
"""Of the fall of forward-only training: losses that all are timed to."""

Points = list[dict[str, Any]]


def label(settings: Settings) -> str:
    """An estimator's name in tables: its kind, queries x rows."""
    name = f"{settings['estimator']} {settings['queries']} x {settings['batch_rows']}"
    return f"{name}, scaled" if settings["scaling"] else name


def loss_at(points: Points, axis: str, place: float) -> float:
    """The loss at a number of passes or seconds, on the line between the points around it."""
    finite = [(point[axis], math.nan if point["loss"] is None else point["loss"]) for point in points]
    places, losses = zip(*finite, strict=True)
    return float(np.interp(place, places, losses))


def estimator_tables(results: Path) -> dict[str, str]:
    """How much further each contender's loss falls than the baseline's, in the runs that both have."""
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
    return {"paired": _markdown(pd.DataFrame(found)), "texts": _markdown(texts)}


def learning_tables(results: Path) -> dict[str, str]:
    """Seconds of each method to shares of the fall of forward-only training, and its memory."""
    cells = Cells(results / "learning.jsonl").of("learning")
    groups: dict[tuple[str, str, int], list[tuple[Settings, Result]]] = defaultdict(list)
    for settings, result in cells:
        groups[settings["model"], settings["text"], settings["seed"]].append((settings, result))
    rows = []
    for (model, text, seed), found in groups.items():
        goals = _goals(found)
        for settings, result in found:
            points = result["points"]
            best = min(points, key=lambda point: float(point["loss"]))
            peak = f"{result['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in result else ""
            rows.append(
                {
                    "text": f"{model}, {text}" + (f", seed {seed}" if seed else ""),
                    "method": settings["method"],
                    "steps": settings["steps"],
                    **{f"s to {100 * share:g} %": _reached(points, goal) for share, goal in goals.items()},
                    "lowest loss": f"{best['loss']:.3f}",
                    "search, s": f"{result['search_s']:.0f}",
                    "peak, MB": peak,
                    "bytes": result.get("bytes", ""),
                }
            )
    return {"times": _markdown(pd.DataFrame(rows).fillna(""))}


def _goals(found: list[tuple[Settings, Result]]) -> dict[float, float]:
    """Losses at shares of the fall of forward-only training on the same text; none where that was not run."""
    own = [result["points"] for settings, result in found if settings["method"] == FORWARD_ONLY]
    if not own:
        return {}
    (points,) = own
    base, lowest = points[0]["loss"], min(point["loss"] for point in points)
    return {share: base - share * (base - lowest) for share in SHARES}


def _reached(points: Points, loss: float) -> str:
    found = next((point for point in points if point["loss"] <= loss), None)
    return "not reached" if found is None else f"{found['seconds']:.1f}"


def _markdown(frame: pd.DataFrame) -> str:
    return str(frame.to_markdown(index=False, disable_numparse=True))
