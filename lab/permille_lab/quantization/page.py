"""Tables of docs/results/quantizers.md, from finished cells.

Differences from the 16-bit model are paired by window, so that the difficulty of the text cancels.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from permille_lab.evaluate.specification import Base
from permille_lab.measuring.cells import Cells, Result
from permille_lab.measuring.tables import markdown

Found = Mapping[tuple[str, str], Result]
"""Results by model and base."""

_FORMS: Mapping[str, str] = {
    Base.FLOAT32: "float32",
    Base.INT8: "int8",
    Base.INT4_G32: "int4, groups of 32",
    Base.AUTO_ROUND_INT4: "int4, groups of 128, calibrated",
    Base.NF4: "NF4",
    "squeezellm": "SqueezeLLM (removed)",
}


def tables(results: Path) -> dict[str, str]:
    """Return the tables by their names in the template."""
    cells = Cells(results / "quantizers.jsonl")
    found = {(settings["model"], settings["base"]): result for settings, result in cells.of("quantizers")}
    return {"schemes": _side_by_side(cells, found), "bases": _losses(found)}


def _side_by_side(cells: Cells, found: Found) -> str:
    rows = []
    for settings, speed in cells.of("speed"):
        for base, form in _FORMS.items():
            result = found[settings["model"], base]
            row = {
                "model": settings["model"],
                "weights as": form,
                "bits a weight": f"{result['bits_per_weight']:.2f}",
                "package, MB": f"{speed['package_bytes'][base] / 1e6:.2f}",
            }
            text, own = next(iter(result["texts"].items()))
            row["perplexity"] = f"{math.exp(np.mean(own['losses'])):.2f} ({text})"
            row["step, ms"] = f"{1e3 * speed['gradient_s'][base]:.0f}"
            row["tokens a second"] = f"{speed['tokens_per_s'][base]:.0f}"
            rows.append(row)
    return markdown(rows)


def _losses(found: Found) -> str:
    rows = []
    for (model, base), result in found.items():
        reference = found.get((model, Base.BF16))
        for text, own in result["texts"].items():
            losses_N = np.array(own["losses"])
            row = {
                "model, text": f"{model}, {text}",
                "base": base,
                "bits a weight": f"{result['bits_per_weight']:.2f}",
                "bits per byte": f"{losses_N.mean() / math.log(2) * own['tokens_per_byte']:.4f}",
            }
            if reference is not None and base != Base.BF16:
                more_N = losses_N - np.array(reference["texts"][text]["losses"])
                error = more_N.std(ddof=1) / math.sqrt(len(more_N))
                row["more than 16 bits, nats per token"] = f"{more_N.mean():+.4f} ± {error:.4f}"
            rows.append(row)
    frame = pd.DataFrame(rows).sort_values("model, text", kind="stable").fillna("")
    return markdown(frame)
