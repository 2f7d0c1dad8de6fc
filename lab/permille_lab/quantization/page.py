"""The table of the quantizers' page, from finished cells.

Differences to the 16-bit model are paired by window: what two forms have in common, the text, is not in them.
"""

import math
from pathlib import Path

import numpy as np
import pandas as pd

from permille_lab.evaluate.specification import Base
from permille_lab.measuring.cells import Cells


def tables(results: Path) -> dict[str, str]:
    """By the name that the template has for it."""
    cells = Cells(results / "quantizers.jsonl").of("quantizers")
    found = {(settings["model"], settings["base"]): result for settings, result in cells}
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
                row["more than 16 bits, nats a token"] = f"{more_N.mean():+.4f} ± {error:.4f}"
            rows.append(row)
    frame = pd.DataFrame(rows).sort_values("model, text", kind="stable").fillna("")
    return {"bases": str(frame.to_markdown(index=False, disable_numparse=True))}
