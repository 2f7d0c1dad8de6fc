"""The figures of the evidence's page, from records and cells: each a PNG with a caption.

A figure whose data are missing is left out, and the page says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from permille_lab.benchmarks.cells import Result, Settings
from permille_lab.benchmarks.evidence_plan import DYNAMIC, QUERIES, STATIC, masked_share
from permille_lab.benchmarks.evidence_records import by_density
from permille_lab.evaluate.figures import Line, Panel, lines_picture, split_picture
from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.prompts import Task

GradientCells = Sequence[tuple[Settings, Result]]

FIGURES = {
    "fractions": "accuracy and loss by fraction, static masks (figure 5a)",
    "dynamic": "accuracy and loss by fraction, C4, task, static and dynamic masks (figure 5b)",
    "coverage": "share of the squared gradient by fraction (figures 2, 7)",
    "transfer": "what masks hold of the task's gradient while training (figures 3, 8)",
    "steps": "a step by its parts (figure 6)",
    "time": "loss over wall time (figure 6)",
    "memory": "peak memory of first order and ZO (P-RGE figure 4)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure: `key` of `FIGURES`, the stage that makes its data, and the image."""

    key: str
    name: str
    caption: str
    stage: str
    png: bytes


def fraction_pictures(records: Sequence[Json], models: Mapping[str, Path]) -> list[Picture]:
    """Figures 5a and 5b, each by accuracy and by loss."""
    own = by_density(records)
    if not own:
        return []
    groups = {"fractions": STATIC, "dynamic": ("zo:sensitive-c4", *STATIC[1:3], *DYNAMIC)}
    pictures = []
    for key, methods in groups.items():
        for outcome, label in (("accuracy", "accuracy"), ("loss", "loss of the right answer (nats a token)")):
            panels = [
                Panel(
                    title=f"{model}, {task}",
                    lines=[
                        line
                        for method in methods
                        if (line := _by_density(own, models[model], task, method, outcome)).x
                    ],
                    level=_level(records, model, task, outcome),
                )
                for model, task in dict.fromkeys((record["model"], record["task"]) for record in own)
                if model in models and not (task == Task.TEXT and (outcome == "accuracy" or key == "dynamic"))
            ]
            if not panels:
                continue
            png = lines_picture(
                panels, x_label="fraction of the linear weights", y_label=label, log_x=True, share_y=False
            )
            caption = f"{label.capitalize()} on test items by fraction; mean and deviation over seeds."
            pictures.append(
                Picture(key=key, name=f"{key}-{outcome}", caption=caption, stage="fractions", png=png)
            )
    return pictures


def coverage_pictures(cells: GradientCells) -> list[Picture]:
    """Figure 2: one panel a model; the corpus' line stands once."""
    if not cells:
        return []
    panels = []
    for model in dict.fromkeys(settings["model"] for settings, _ in cells):
        own = [(settings, result) for settings, result in cells if settings["model"] == model]
        fractions = own[0][1]["fractions"]
        lines = [Line(name="C4", x=fractions, y=own[0][1]["curves"]["corpus"]["mean"])]
        lines += [
            Line(name=settings["task"], x=result["fractions"], y=result["curves"]["task"]["mean"])
            for settings, result in own
        ]
        panels.append(Panel(title=model, lines=lines))
    png = lines_picture(
        panels,
        x_label="fraction of a layer's weights",
        y_label="share of the squared gradient",
        log_x=True,
        y_limits=(0, 1.02),
    )
    caption = "Cumulative share of the squared gradient, largest first; mean over the linear layers."
    return [Picture(key="coverage", name="coverage", caption=caption, stage="coverage", png=png)]


def transfer_pictures(cells: GradientCells) -> list[Picture]:
    """Figure 3: one figure a model and task, one panel a density."""
    pictures = []
    for settings, result in cells:
        rows = result["rows"]
        panels = []
        for density in dict.fromkeys(row["density"] for row in rows):
            of_density = [row for row in rows if row["density"] == density]
            lines = [
                Line(
                    name=name,
                    x=[row["step"] for row in of_density],
                    y=[row["shares"][name] for row in of_density],
                )
                for name in of_density[0]["shares"]
            ]
            panels.append(Panel(title=f"density {density:g}", lines=lines))
        png = lines_picture(
            panels, x_label="step of first-order training", y_label="share of the squared gradient"
        )
        caption = (
            f"{settings['model']}, {settings['task']}: share of the task's squared gradient on each mask, "
            "judged on examples that selected none; mean over the linear layers."
        )
        name = f"transfer-{settings['model']}-{settings['task']}"
        pictures.append(Picture(key="transfer", name=name, caption=caption, stage="transfer", png=png))
    return pictures


def step_pictures(cells: GradientCells, records: Sequence[Json]) -> list[Picture]:
    """Figure 6: parts of a step, and validation loss over wall time."""
    if not cells:
        return []
    panels = {
        f"{settings['model']}, {settings['task']} ({result['sequences']} sequences)": result["seconds"]
        for settings, result in cells
    }
    caption = "Median seconds of a step of one query (two forward passes), by part."
    pictures = [Picture(key="steps", name="steps", caption=caption, stage="steps", png=split_picture(panels))]
    timed = [
        panel
        for settings, result in cells
        if (panel := _over_time(records, settings["model"], settings["task"], result["seconds"])).lines
    ]
    if timed:
        png = lines_picture(timed, x_label="minutes", y_label="validation loss (nats a token)", share_y=False)
        caption = (
            f"Validation loss of the sweeps' runs (mean over seeds) over steps x {QUERIES} queries x the "
            "median seconds of a query, of the attempt that counts, search not counted: sensitive weights on "
            "the product's engine, all weights with MeZO. Computed; runs on a clock are in `time_to_loss.md`."
        )
        pictures.append(Picture(key="time", name="loss-over-time", caption=caption, stage="steps", png=png))
    return pictures


def memory_pictures(cells: GradientCells) -> list[Picture]:
    """P-RGE's figure 4: one panel a number of sequences."""
    if not cells:
        return []
    panels = []
    for sequences in sorted({settings["sequences"] for settings, _ in cells}):
        own = sorted(
            (settings["tokens"], result["contenders"])
            for settings, result in cells
            if settings["sequences"] == sequences
        )
        names = dict.fromkeys(name for _, contenders in own for name in contenders)
        lines = []
        for name in names:
            points = [
                (tokens, contenders[name]["above_package_bytes"] / 2**20)
                for tokens, contenders in own
                if "above_package_bytes" in contenders.get(name, {})
            ]
            lines.append(Line(name=name, x=[x for x, _ in points], y=[y for _, y in points]))
        panels.append(Panel(title=f"{sequences} sequences", lines=lines))
    shape, layers = cells[0][0]["shape"], cells[0][0]["layers"]
    whole = f"shape {shape}" + ("" if layers is None else f" with {layers} layers")
    png = lines_picture(panels, x_label="tokens a sequence", y_label="MiB above the package")
    caption = f"Peak resident memory of a training step less the package's bytes, {whole}, imports included."
    return [Picture(key="memory", name="memory", caption=caption, stage="memory", png=png)]


def _by_density(records: Sequence[Json], folder: Path, task: str, method: str, outcome: str) -> Line:
    own = [
        record
        for record in records
        if (record["model"], record["task"], record["method"]) == (folder.name, task, method)
    ]
    densities = sorted({record["density"] for record in own})
    outcomes = [[record[outcome] for record in own if record["density"] == density] for density in densities]
    return Line(
        name=method.removeprefix("zo:"),
        x=[masked_share(folder, density) for density in densities],
        y=[float(np.mean(found)) for found in outcomes],
        spread=[float(np.std(found, ddof=1)) if len(found) > 1 else 0.0 for found in outcomes],
        style="--" if method in DYNAMIC else "-",
    )


def _level(records: Sequence[Json], model: str, task: str, outcome: str) -> tuple[str, float] | None:
    found = [
        record[outcome]
        for record in records
        if (record["stage"], record["model"], record["task"], record["method"], record["base"])
        == ("table", model, task, "zo:full", "bf16")
    ]
    return ("all weights", float(np.mean(found))) if found else None


def _over_time(
    records: Sequence[Json], model: str, task: str, seconds: Mapping[str, Mapping[str, float]]
) -> Panel:
    ours = min((name for name in seconds if name != "all weights"), key=lambda name: _whole(seconds[name]))
    pairs = {"zo:sensitive-c4": seconds[ours], "zo:full": seconds["all weights"]}
    lines = []
    for method, parts in pairs.items():
        curves = [
            record["curve"]
            for record in records
            if (record["stage"], record["model"], record["task"], record["method"], record["base"])
            == ("table", model, task, method, "bf16")
            and all(loss is not None for _, loss in record["curve"])
        ]
        if curves:
            minutes = [step * QUERIES * _whole(parts) / 60 for step, _ in curves[0]]
            lines.append(Line(name=method, x=minutes, y=np.array(curves)[:, :, 1].mean(axis=0).tolist()))
    return Panel(title=f"{model}, {task}", lines=lines)


def _whole(parts: Mapping[str, float]) -> float:
    return sum(parts.values())
