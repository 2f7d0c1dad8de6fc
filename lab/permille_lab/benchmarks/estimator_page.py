"""The comparison of estimators as markdown, from finished cells."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from permille.zo.header import EstimatorKind
from permille_lab.benchmarks.cells import Cells
from permille_lab.benchmarks.estimator_runs import Contender

FIGURE = "estimators"
BASELINE = Contender(estimator=EstimatorKind.SPSA, queries=8).label

Points = list[dict[str, Any]]
# Of one (model, text, seed): the points of each contender, by label.
Group = dict[str, Points]


def page(cells: Cells) -> str:
    """All groups in one table for each model and text, and what each contender does over all of them."""
    groups = _groups(cells)
    lines = [
        "# Estimators at equal cost",
        "",
        "Made by `python -m permille_lab.benchmarks.estimators`; all points are in `estimators.json`. Nats per held-out",
        "token that training takes off, mean over seeds: after the same number of row passes, and after the",
        "same processor seconds (those of the contender of the group that was done first). Speed: seconds",
        f"that `{BASELINE}` needs for its last loss, divided by those that the contender needs for it;",
        "geometric mean over the runs that reach it. Above base: runs that are no lower then than where",
        "they began (the search chose a step that is too long; an agent begins anew there, these do not).",
        "Name: estimator, queries x rows.",
    ]
    for model, text in sorted({key[:2] for key in groups}):
        chosen = [group for key, group in sorted(groups.items()) if key[:2] == (model, text)]
        lines += ["", f"## {model}, {text}", "", *_table(chosen)]
    lines += ["", f"## All, against `{BASELINE}`", "", *_paired(list(groups.values()))]
    failed = [
        f"- {Contender(**_contender(settings)).label}: {settings['model']}, {settings['text']}, "
        f"seed {settings['seed']}: {result['failed']}"
        for settings, result in cells.of(FIGURE)
        if "failed" in result
    ]
    if failed:
        lines += ["", "## Without a usable epsilon or step size", "", *failed]
    return "\n".join(lines) + "\n"


def loss_at(points: Points, axis: str, place: float) -> float:
    """The loss at a number of passes or seconds, on the line between the points around it; NaN where a loss
    was not finite."""
    before = points[0]
    for point in points[1:]:
        if point[axis] >= place:
            share = (place - before[axis]) / (point[axis] - before[axis])
            return float(_loss(before) + share * (_loss(point) - _loss(before)))
        before = point
    return _loss(points[-1])


def seconds_to(points: Points, loss: float) -> float:
    """Seconds until the loss is reached, on the line between points; infinite where it never is."""
    before = points[0]
    for point in points[1:]:
        if _loss(point) <= loss:
            fall = _loss(before) - _loss(point)
            share = 1.0 if fall <= 0 else (_loss(before) - loss) / fall
            return float(before["cpu_s"] + share * (point["cpu_s"] - before["cpu_s"]))
        before = point
    return math.inf


def _groups(cells: Cells) -> dict[tuple[str, str, int], Group]:
    groups: dict[tuple[str, str, int], Group] = defaultdict(dict)
    for settings, result in cells.of(FIGURE):
        if "points" in result:
            label = Contender(**_contender(settings)).label
            groups[settings["model"], settings["text"], settings["seed"]][label] = result["points"]
    return groups


def _contender(settings: dict[str, Any]) -> dict[str, Any]:
    names = ("queries", "batch_rows", "scaling")
    return {"estimator": EstimatorKind(settings["estimator"]), **{name: settings[name] for name in names}}


def _table(groups: Iterable[Group]) -> list[str]:
    columns: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        for label, found in _figures(group).items():
            for name, number in found.items():
                columns[label][name].append(number)
    lines = [
        "| contender | runs | at equal passes | at equal seconds | SE | speed | reached | above base |",
        "|---" * 8 + "|",
    ]
    for label, column in sorted(columns.items(), key=lambda item: _downwards(item[1]["by_seconds"])):
        seconds = column["by_seconds"]
        error = _error(seconds)
        reached = [speed for speed in column["speed"] if speed > 0]
        speed = f"{math.exp(np.mean(np.log(reached))):.2f}" if reached else "-"
        lines.append(
            f"| {label} | {len(seconds)} | {np.mean(column['by_passes']):.3f} | {np.mean(seconds):.3f} "
            f"| {error} | {speed} | {len(reached)} of {len(column['speed'])} "
            f"| {_above_base(seconds)} |"
        )
    return lines


def _paired(groups: Iterable[Group]) -> list[str]:
    """Each contender against the baseline, over the runs that both have: others say nothing of the two."""
    differences: dict[str, list[float]] = defaultdict(list)
    falls: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        figures = _figures(group)
        if BASELINE not in figures:
            continue
        for label, found in figures.items():
            if label != BASELINE:
                differences[label].append(found["by_seconds"] - figures[BASELINE]["by_seconds"])
            falls[label].append(found["by_seconds"])
    lines = [
        "Over the runs that both have, at equal seconds: by how much more the loss falls, and in how many",
        "of them it does.",
        "",
        f"| contender | runs | more than `{BASELINE}` | SE | in | above base |",
        "|---" * 6 + "|",
    ]
    for label, more in sorted(differences.items(), key=lambda item: _downwards(item[1])):
        error = _error(more)
        ahead = sum(difference > 0 for difference in more)
        lines.append(
            f"| {label} | {len(more)} | {np.mean(more):+.3f} | {error} | {ahead} of {len(more)} "
            f"| {_above_base(falls[label])} |"
        )
    return [*lines, f"| {BASELINE} | {len(falls[BASELINE])} | | | | {_above_base(falls[BASELINE])} |"]


def _downwards(numbers: list[float]) -> tuple[bool, float]:
    """Sorts by the mean, the largest first; one that is not finite last."""
    mean = float(np.mean(numbers))
    return (False, -mean) if math.isfinite(mean) else (True, 0.0)


def _error(numbers: list[float]) -> str:
    """The standard error of their mean."""
    return f"{np.std(numbers, ddof=1) / math.sqrt(len(numbers)):.3f}" if len(numbers) > 1 else "-"


def _above_base(falls: Iterable[float]) -> int:
    """Runs whose loss has not fallen; one that is not finite has not."""
    return sum(not fall > 0 for fall in falls)


def _figures(group: Group) -> dict[str, dict[str, float]]:
    """Of each contender: the fall at equal passes and at equal seconds, and the speed (0: not reached)."""
    passes = min(points[-1]["passes"] for points in group.values())
    seconds = min(points[-1]["cpu_s"] for points in group.values())
    figures = {}
    for label, points in group.items():
        base = _loss(points[0])
        found = {
            "by_passes": base - loss_at(points, "passes", passes),
            "by_seconds": base - loss_at(points, "cpu_s", seconds),
        }
        if BASELINE in group:
            goal = _loss(group[BASELINE][-1])
            needed = seconds_to(points, goal)
            if goal < base:  # else the baseline has learned nothing that could be reached sooner
                reached = 0 < needed < math.inf
                found["speed"] = seconds_to(group[BASELINE], goal) / needed if reached else 0.0
        figures[label] = found
    return figures


def _loss(point: dict[str, Any]) -> float:
    return math.nan if point["loss"] is None else float(point["loss"])
