"""The tables of the pages on estimators and on time to a loss, from finished cells."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from permille_lab.measuring.cells import Cells, Settings

BASELINE = "spsa 8 x 2"
SHARES = (0.5, 0.75, 0.95)
"""Of our fall: losses that others are timed to."""

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


def time_tables(results: Path) -> dict[str, str]:
    """Seconds of each method to shares of our fall, and what it takes to get there."""
    groups: dict[str, dict[str, tuple[Settings, dict[str, Any]]]] = defaultdict(dict)
    for settings, result in Cells(results / "time_to_loss.jsonl").of("time_to_loss"):
        groups[settings["model"]][settings["method"]] = settings, result
    rows = []
    for model, methods in groups.items():
        ours = methods["permille"][1]["points"]
        base, lowest = ours[0]["loss"], min(point["loss"] for point in ours)
        for method, (settings, result) in methods.items():
            points = result["points"]
            best = min(points, key=lambda point: float(point["loss"]))
            goals = {
                f"s to {100 * share:g} %": _reached(points, base - share * (base - lowest))
                for share in SHARES
            }
            peak = f"{result['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in result else ""
            rows.append(
                {
                    "model": model,
                    "method": method,
                    "steps": settings["steps"],
                    **goals,
                    "lowest loss": f"{best['loss']:.3f}",
                    "after, s": f"{best['seconds']:.0f}",
                    "search, s": f"{result['search_s']:.0f}",
                    "peak, MB": peak,
                }
            )
    return {"times": _markdown(pd.DataFrame(rows))}


def _reached(points: Points, loss: float) -> str:
    found = next((point for point in points if point["loss"] <= loss), None)
    return "not reached" if found is None else f"{found['seconds']:.1f}"


def _markdown(frame: pd.DataFrame) -> str:
    return str(frame.to_markdown(index=False, disable_numparse=True))
