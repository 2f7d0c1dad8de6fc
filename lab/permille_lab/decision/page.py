"""The table of the page on decisions, from finished cells."""

from pathlib import Path

import pandas as pd

from permille_lab.measuring.cells import Cells


def tables(results: Path) -> dict[str, str]:
    """Shares of adopted models by their true gain, the agent's rule before the bootstrap's."""
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
    found.columns.name = None
    return {"adopted": str(found.reset_index().to_markdown(index=False, disable_numparse=True))}
