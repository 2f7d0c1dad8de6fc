"""Tables of docs/results/exports.md, from finished cells."""

from pathlib import Path

from permille_lab.measuring.cells import Cells
from permille_lab.measuring.tables import markdown


def tables(results: Path) -> dict[str, str]:
    """Return the tables by their names in the template."""
    rows = [
        {
            "model, package": f"{settings['model']}, {settings['scheme']}",
            "type": kind,
            "MB": f"{found['bytes'] / 1e6:.2f}",
            "divergence": f"{found['divergence']:.1e}",
            "loss, base": f"{found['base']:.4f}",
            "loss, personal": f"{found['personal']:.4f}",
            "share of the gain": f"{100 * found['share']:.1f} %",
            "change kept": f"{100 * found['kept']:.2f} %",
            "same greedy texts": found["same_texts"],
        }
        for settings, result in Cells(results / "exports.jsonl").of("exports")
        for kind, found in result["kinds"].items()
    ]
    ours = "; ".join(
        f"{settings['model']}, {settings['scheme']}: {result['base']:.4f} and {result['personal']:.4f}"
        for settings, result in Cells(results / "exports.jsonl").of("exports")
    )
    return {
        "kinds": markdown(rows),
        "ours": ours,
    }
