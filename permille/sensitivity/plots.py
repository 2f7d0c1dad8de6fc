"""Pictures of the evidence: PNG bytes, the same for the same numbers and library versions. matplotlib
without a screen.

Figures are built on the Agg canvas directly: no pyplot, no global state, safe in any thread.
"""

import io
from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from permille.sensitivity.coverage import CurvePoint

_DOTS_PER_INCH = 120


def curve_picture(curves: Mapping[str, Sequence[CurvePoint]], *, density: float | None = None) -> bytes:
    """Figure 2: share of the score by fraction of the weights, one line a name; `density` draws a vertical
    line."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([p["fraction"] for p in points], [p["coverage"] for p in points], label=name)
    if density is not None:
        axes.axvline(density, color="grey", linewidth=0.8, linestyle="--", label=f"density {density:g}")
    axes.set(xscale="log", ylim=(0, 1.02), xlabel="fraction of the weights", ylabel="share of the score")
    axes.grid(visible=True, linewidth=0.3)
    axes.legend(loc="upper left")
    return _png(figure)


def error_picture(errors: Mapping[str, float]) -> bytes:
    """Relative reconstruction error by tensor, in order."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(len(errors)), list(errors.values()), marker=".", linewidth=0.6)
    axes.set(xlabel="tensor", ylabel="relative error", ylim=(0, None))
    axes.grid(visible=True, linewidth=0.3)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    data = io.BytesIO()
    # Software and date would make the bytes a function of more than the numbers.
    figure.savefig(data, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return data.getvalue()
