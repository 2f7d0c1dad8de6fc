"""Losses over the time that they took, drawn; and the page that shows them, written."""

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from permille.files import write_atomic
from permille_lab.benchmarks.cells import Cells, Result
from permille_lab.benchmarks.loss_page import Group, first_order_runs, mezo_runs, page
from permille_lab.evaluate.figures import Line, Panel, lines_picture

DATA, PAGE, FOLDER = "time_to_loss.json", "time_to_loss.md", "figures"
_CAPTION = (
    "Lowest held-out loss so far over the processor's seconds of training, evaluations and search not "
    "counted, in runs that were made: "
)


def write(output: Path, cells: Cells) -> None:
    """Write data, figures and page."""
    pictures = {
        f"{FOLDER}/{name}.png": (_picture(groups), f"{_CAPTION}{against}")
        for name, against, groups in (
            ("loss-over-seconds-mezo", "against MeZO on all weights", mezo_runs(cells)),
            ("loss-over-seconds-first-order", "against first-order training", first_order_runs(cells)),
        )
        if groups
    }
    document = [
        {"figure": figure, "settings": settings, "result": result} for figure, settings, result in cells
    ]
    (output / FOLDER).mkdir(parents=True, exist_ok=True)
    for file, (png, _) in pictures.items():
        write_atomic(output / file, png)
    write_atomic(output / DATA, (json.dumps(document) + "\n").encode())
    captions = {file: caption for file, (_, caption) in pictures.items()}
    write_atomic(output / PAGE, page(cells, captions).encode())


def _picture(groups: Mapping[Group, Mapping[str, Result]]) -> bytes:
    panels = [
        Panel(title=_title(group), lines=[lowest_so_far(name, result) for name, result in found.items()])
        for group, found in groups.items()
    ]
    return lines_picture(
        panels, x_label="seconds", y_label="held-out loss (nats a token)", log_x=True, share_y=False
    )


def _title(group: Group) -> str:
    model, speaker, seed, threads = group
    return f"{model}, {speaker}, seed {seed}" + (f", {threads} threads" if threads > 1 else "")


def lowest_so_far(name: str, result: Result) -> Line:
    """Over all attempts, after the first step: before it no time is spent, which a logarithm cannot show."""
    points = result["points"]
    lows = accumulate((point["loss"] for point in points), min)
    at = [(point["cpu_s"], low) for point, low in zip(points, lows, strict=True) if point["cpu_s"] > 0]
    return Line(name=name, x=[seconds for seconds, _ in at], y=[low for _, low in at])
