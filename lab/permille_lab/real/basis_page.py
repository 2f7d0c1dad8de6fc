"""Tables of basis.md, and the numbers in its text, from finished cells.

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
"""The page judges whether groups need this many times the passes of a basis, or more."""
BASIS_STEPS = 4
"""Steps that a run makes in the basis, the first ones."""


def tables(results: Path) -> dict[str, str]:
    """Return the tables of basis.md, and the numbers in its text, by their names in the template."""
    runs = pd.DataFrame(
        [
            {
                "text": settings["person"],
                "method": settings["method"],
                "passes": passes_of(settings["method"], settings["steps"]),
                "fall": result["before"] - result["after"],
                "rise": result["general"][1] - result["general"][0],
                "chat": result["chat"][1] - result["chat"][0],
                "lost": result["fault"],
                "seconds": result["cpu_s"],
            }
            for settings, result in Cells(results / "basis.jsonl").of("basis")
        ]
    )
    # Compare means over the seeds.
    means = runs.pivot_table(index="text", columns=["method", "passes"], values="fall", sort=False)
    passes, basis = next((int(passes), fall) for passes, fall in means[BASIS].items())
    groups = means[GROUPS]
    ratios = pd.Series({text: _needed(groups.loc[text], fall) / passes for text, fall in basis.items()})
    return {
        "falls": markdown(_fall_rows(runs, ratios)),
        "methods": markdown(_method_rows(runs)),
        "texts": str(len(ratios)),
        "won": str(int((ratios >= RATIO).sum())),
        "least": f"{ratios.min():.1f}",
    }


def passes_of(method: str, steps: int) -> int:
    """Return the forward passes of one row that the steps take, without those on the reference.

    A step along the gradient takes as long as three passes.
    """
    kind = EstimatorKind.GRADIENT if method == GRADIENT else EstimatorKind.ONE_SIDED
    options = TrainOptions.of(kind, steps=1)
    first = min(steps, BASIS_STEPS) if BASIS in method else 0
    return options.batch_rows * (first * USERS + (steps - first) * (options.queries or 3))


def _needed(fall_P: "pd.Series[float]", fall: float) -> float:
    """Return the passes at which groups reach a fall, interpolated between measurements, or infinity."""
    known = fall_P.dropna().sort_index()
    best = np.maximum.accumulate([0.0, *known])
    return float(np.interp(fall, best, [0, *known.index])) if fall <= best[-1] else np.inf


def _fall_rows(runs: pd.DataFrame, ratios: "pd.Series[float]") -> Iterator[dict[str, str]]:
    """Yield a row for each text: the mean fall of each method over the seeds, with the least and most."""
    columns = runs[["method", "passes"]].drop_duplicates().sort_values(["method", "passes"])
    for text, found in runs.groupby("text", sort=False):
        row = {"text": str(text)}
        for method, passes in columns.itertuples(index=False):
            falls = found.loc[(found["method"] == method) & (found["passes"] == passes), "fall"]
            column = f"{method}, {passes}" if passes else method
            row[column] = f"{falls.mean():.3f}" if len(falls) else ""
            if len(falls) > 1:
                row[column] += f" ({falls.min():.3f} to {falls.max():.3f})"
        if text in ratios:
            row["ratio"] = f"{ratios[text]:.1f}" if np.isfinite(ratios[text]) else "more"
        yield row


def _method_rows(runs: pd.DataFrame) -> Iterator[dict[str, str]]:
    """Yield a row for each method: falls, rises and lost answers over all texts and seeds."""
    for (method, passes), found in runs.groupby(["method", "passes"]):
        lost = found.loc[found["lost"] != "", "text"].value_counts()
        yield {
            "method": str(method),
            "row passes": str(passes),
            "runs": str(len(found)),
            "fall": f"{found['fall'].mean():.3f}",
            "least fall": f"{found['fall'].min():.3f}",
            "general rise": f"{found['rise'].mean():+.3f}",
            "chat rise": f"{found['chat'].mean():+.3f}",
            "most chat rise": f"{found['chat'].max():+.3f}",
            "lost answers": ", ".join(f"{text} ({number})" for text, number in lost.items()) or "none",
            "seconds": f"{found['seconds'].mean():.0f}",
        }
