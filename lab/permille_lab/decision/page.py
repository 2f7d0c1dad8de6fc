"""Tables of docs/results/decision.md, from finished cells."""

from pathlib import Path

import pandas as pd

from permille_lab.measuring.cells import Cells
from permille_lab.measuring.tables import markdown


def tables(results: Path) -> dict[str, str]:
    """Return the percentage of adopted models by their true gain, with that of the bootstrap in brackets."""
    rows = [
        {
            "gains of groups": settings["draw"],
            "groups": settings["groups"],
            "gain": f"gain {settings['gain']:g}",
            "adopted": f"{100 * result['evidence']:.1f} ({100 * result['bootstrap']:.1f})",
        }
        for settings, result in Cells(results / "decision.jsonl").of("decision")
    ]
    found = pd.DataFrame(rows).pivot_table(
        index=["gains of groups", "groups"], columns="gain", values="adopted", aggfunc="first", sort=False
    )
    little = pd.DataFrame(
        {
            "gains of groups": settings["draw"],
            "alike": f"{settings['alike']:g}",
            "gain": f"gain {settings['gain']:g}",
            "adopted": f"{100 * result['adopted']:.1f}",
        }
        for settings, result in Cells(results / "decision.jsonl").of("little")
    ).pivot_table(
        index=["gains of groups", "alike"], columns="gain", values="adopted", aggfunc="first", sort=False
    )
    return {"adopted": markdown(found), "little": markdown(little)}
