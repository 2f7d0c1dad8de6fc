"""Table of docs/results/privacy.md, from finished cells."""

from pathlib import Path

import pandas as pd

from permille_lab.measuring.cells import Cells
from permille_lab.measuring.tables import markdown


def tables(results: Path) -> dict[str, str]:
    """Return the attacker's AUC by its knowledge and by the promised epsilon."""
    rows = []
    for settings, result in Cells(results / "privacy.jsonl").of("attack"):
        knows = "all other devices" if settings["knows_others"] else f"none of {settings['devices']} devices"
        promised = settings["dp_epsilon"]
        rows.append(
            {
                "the attacker knows": knows,
                "epsilon": "no noise" if promised is None else f"{promised:g}",
                "auc": f"{result['auc']:.2f} ± {1.96 * result['error']:.2f} (at most {result['most']:.2f})",
            }
        )
    found = pd.DataFrame(rows).pivot_table(
        index="the attacker knows", columns="epsilon", values="auc", aggfunc="first", sort=False
    )
    found = found[sorted(found.columns, key=lambda name: float(name) if name[0].isdigit() else 1e9)[::-1]]
    return {"attack": markdown(found)}
