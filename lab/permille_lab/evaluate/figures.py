"""Pictures of the evidence as PNG: the same bytes for the same numbers and library versions.

Figures are built on the Agg canvas directly: no pyplot, no screen, no global state. A line keeps its colour
and its marker from figure to figure, by its name.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_DOTS_PER_INCH = 110
_MARKERS = "osv^D<>Pp*"
_PARTS = {"forward": "#4c78a8", "perturbation": "#f58518", "update": "#54a24b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of one name; `spread` is drawn as bars above and below.

    Attributes:
        style: matplotlib's name of the dashes.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
    style: str = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One of the plots that stand beside each other.

    Attributes:
        level: (name, y) of a horizontal line: a method that has no x.
    """

    title: str
    lines: Sequence[Line]
    level: tuple[str, float] | None = None


def lines_picture(
    panels: Sequence[Panel],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    share_y: bool = True,
    y_limits: tuple[float, float] | None = None,
) -> bytes:
    """Panels with lines, one legend for all."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    figure, all_axes = _figure(len(panels), share_y=share_y)
    for axes, panel in zip(all_axes, panels, strict=True):
        for line in panel.lines:
            number = names.index(line.name)
            axes.errorbar(
                line.x,
                line.y,
                yerr=line.spread,
                label=line.name,
                color=f"C{number % 10}",
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=4,
                linewidth=1.4,
                linestyle=line.style,
                capsize=2,
                elinewidth=0.8,
            )
        if panel.level is not None:
            axes.axhline(panel.level[1], color="grey", linewidth=1, linestyle=":", label=panel.level[0])
        axes.set(title=panel.title, xlabel=x_label)
        if log_x:
            axes.set_xscale("log")
        if y_limits is not None:
            axes.set_ylim(*y_limits)
    all_axes[0].set_ylabel(y_label)
    return _png(figure, all_axes)


def split_picture(panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> bytes:
    """Seconds a step by part, stacked: panel -> contender -> part -> seconds."""
    figure, all_axes = _figure(len(panels), share_y=False)
    for axes, (title, contenders) in zip(all_axes, panels.items(), strict=True):
        names = list(contenders)
        bottoms = [0.0] * len(names)
        for part, color in _PARTS.items():
            heights = [1000 * contenders[name][part] for name in names]
            axes.bar(range(len(names)), heights, bottom=bottoms, label=part, color=color, width=0.6)
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
        axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
        axes.set_title(title)
    all_axes[0].set_ylabel("milliseconds a step")
    return _png(figure, all_axes)


def _figure(panels: int, *, share_y: bool) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(5.5, 3.9 * panels), 4.0), layout="constrained")
    grid = figure.subplots(1, panels, sharey=share_y, squeeze=False)
    return figure, list(grid[0])


def _png(figure: Figure, all_axes: Sequence[Axes]) -> bytes:
    known: dict[str, Artist] = {}
    for axes in all_axes:
        axes.grid(visible=True, linewidth=0.3)
        axes.set_axisbelow(True)
        known |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(known.values()), list(known), loc="outside lower center", ncols=4, fontsize=8)
    FigureCanvasAgg(figure)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return data.getvalue()
