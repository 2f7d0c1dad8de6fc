"""Tables of basis.md, and counts for its text, from finished cells.

# Legend: P numbers of passes.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from permille.choices import EstimatorKind
from permille.training.basis import USERS
from permille_agent.embed import TrainOptions
from permille_lab.measuring.cells import Cells
from permille_lab.measuring.tables import markdown

BASIS, GROUPS, THEN = "basis", "groups", "basis, then groups"
BETTER, GRADIENT = "better base", "gradient"
RATIO = 4
"""A text counts as won if groups need at least this many times the passes of the basis."""
BASIS_STEPS = 4
"""Number of first steps that a run takes in the basis."""


def tables(results: Path) -> dict[str, str]:
    """Return the tables of basis.md, and counts for its text, by their names in the template."""
    cells = Cells(results / "basis.jsonl").of("basis")
    runs = pd.DataFrame(
        [
            {
                "text": settings["person"],
                "seed": settings["seed"],
                "method": settings["method"],
                "passes": passes_of(settings["method"], settings["steps"]),
                "fall": result["before"] - result["after"],
                "rise": result["general"][1] - result["general"][0],
                "chat": result["chat"][1] - result["chat"][0],
                "lost": result["fault"],
                "seconds": result["cpu_s"],
            }
            for settings, result in cells
        ]
    )
    points = pd.DataFrame(
        [
            {"text": settings["person"], "passes": passes_of(GROUPS, step), "fall": result["before"] - loss}
            for settings, result in cells
            if settings["method"] == GROUPS
            for step, loss in result["curve"]
        ]
    )
    # Compare means over the seeds.
    groups = points.pivot_table(index="text", columns="passes", values="fall")
    basis = runs[runs["method"] == BASIS].groupby("text", sort=False)
    needed = {
        text: _needed(groups.loc[text], found["fall"].mean()) for text, found in basis if text in groups.index
    }
    ratios = pd.Series(needed) / basis["passes"].first()[list(needed)]
    by_run = runs.pivot_table(index=["text", "seed"], columns="method", values="fall")
    ahead = by_run[by_run[GROUPS] > by_run[BASIS]].index.get_level_values("text").unique()
    later = (by_run[THEN] - by_run[BASIS]).dropna()
    return {
        "falls": markdown(_fall_rows(runs, ratios)),
        "methods": markdown(_method_rows(runs)),
        "texts": str(len(ratios)),
        "won": str(int((ratios >= RATIO).sum())),
        "ahead": str(len(ahead)),
        "later": f"{later.min():.2f} to {later.max():.2f}",
    }


def passes_of(method: str, steps: int) -> int:
    """Return the forward passes of one row that the steps take, without those on the reference.

    A step along the gradient takes as long as three passes.
    """
    kind = EstimatorKind.GRADIENT if method == GRADIENT else EstimatorKind.ONE_SIDED
    options = TrainOptions.of(kind, steps=1)
    first = min(steps, BASIS_STEPS) if method.startswith(BASIS) else 0
    return options.batch_rows * (first * USERS + (steps - first) * (options.queries or 3))


def _needed(fall_P: "pd.Series[float]", fall: float) -> float:
    """Return the passes at which groups reach a fall, interpolated between checkpoints, or infinity."""
    known = fall_P.dropna()
    best = known.cummax()
    return float(np.interp(fall, best, known.index)) if fall <= best.iloc[-1] else np.inf


def _fall_rows(runs: pd.DataFrame, ratios: "pd.Series[float]") -> Iterator[dict[str, str]]:
    """Yield a row for each text: the mean falls of the main methods over the seeds, with the range."""
    shown = runs[runs["method"].isin([BASIS, GROUPS, THEN, GRADIENT])]
    columns = shown[["method", "passes"]].drop_duplicates().sort_values(["method", "passes"])
    for text, found in shown.groupby("text", sort=False):
        row = {"text": str(text)}
        for method, passes in columns.itertuples(index=False):
            falls = found.loc[(found["method"] == method) & (found["passes"] == passes), "fall"]
            column = f"{method}, {passes}"
            row[column] = f"{falls.mean():.3f}" if len(falls) else ""
            if len(falls) > 1:
                row[column] += f" ({falls.min():.3f} to {falls.max():.3f})"
        if text in ratios:
            row["ratio"] = f"{ratios[text]:.1f}" if np.isfinite(ratios[text]) else f"> {RATIO}"
        yield row


def _method_rows(runs: pd.DataFrame) -> Iterator[dict[str, str]]:
    """Yield a row for each method: means over the texts of the means over seeds, and lost answers."""
    for (method, passes), found in runs.groupby(["method", "passes"]):
        texts = found.groupby("text")[["fall", "rise", "chat", "seconds"]].mean()
        lost = found.loc[found["lost"] != "", "text"].value_counts()
        yield {
            "method": str(method),
            "row passes": str(passes),
            "runs": str(len(found)),
            "fall": f"{texts['fall'].mean():.3f}",
            "least fall": f"{texts['fall'].min():.3f}",
            "general rise": f"{texts['rise'].mean():+.3f}",
            "chat rise": f"{texts['chat'].mean():+.3f}",
            "most chat rise": f"{texts['chat'].max():+.3f}",
            "fall / chat rise": f"{texts['fall'].mean() / texts['chat'].mean():.1f}",
            "lost answers": ", ".join(f"{text} ({number})" for text, number in lost.items()) or "none",
            "seconds": f"{texts['seconds'].mean():.0f}",
        }
