"""The report of a mask as its page shows it: the curve, and the mask's parts by kind, layer and tensor."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

import numpy as np
from pydantic import BaseModel

from permille.models.families import layer_of

WIDTH, HEIGHT = 640, 260
LEFT, TOP, RIGHT, BOTTOM = 44, 10, 26, 30


class CurvePoint(BaseModel):
    """The share of the score that the best fraction of the weights holds."""

    fraction: float
    coverage: float


class TensorRow(BaseModel):
    """The part of a mask in one tensor."""

    name: str
    shape: list[int]
    count: int
    density: float
    score: float
    coverage: float


class MaskEvidence(BaseModel):
    """The report of a mask, as its job has written it."""

    k: int
    numel: int
    coverage: float
    curve: list[CurvePoint]
    tensors: list[TensorRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve as lines of an SVG: share of the score by fraction of the weights, on a logarithmic axis.

    Attributes:
        marks: positions of powers of ten, with their labels.
        density_x: position of the mask's density.
    """

    points: str
    marks: tuple[tuple[float, str], ...]
    density_x: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPart:
    """A mask's part in a tensor, or in all tensors of a layer or of a kind.

    Attributes:
        density: share of its weights that the mask has.
        coverage: share of its score that the mask holds.
    """

    name: str
    count: int
    density: float
    coverage: float


class MaskOrder(StrEnum):
    """Order of the parts of a mask: the order of the model, or the largest share first."""

    LAYER = "layer"
    DENSITY = "density"
    COVERAGE = "coverage"


def curve_of(report: MaskEvidence) -> Curve | None:
    """Return the coverage curve of a report as lines of an SVG, or None if there is nothing to draw."""
    points = [point for point in report.curve if point.fraction > 0]
    if not points or not report.numel:
        return None
    lowest = math.log10(points[0].fraction)
    reach = -lowest or 1.0

    def x_of(fraction: float) -> float:
        return round(LEFT + (math.log10(fraction) - lowest) / reach * (WIDTH - LEFT - RIGHT), 1)

    drawn = (
        f"{x_of(point.fraction)},{round(TOP + (1 - point.coverage) * (HEIGHT - TOP - BOTTOM), 1)}"
        for point in points
    )
    marks = tuple((x_of(10.0**power), _fraction(power)) for power in range(math.ceil(lowest), 1))
    density = min(1.0, max(report.k / report.numel, points[0].fraction))
    return Curve(points=" ".join(drawn), marks=marks, density_x=x_of(density))


def curve_at_density(report: MaskEvidence) -> float | None:
    """Return the share of the score of as many weights, if they were the best of all tensors together."""
    if not report.curve or not report.numel:
        return None
    fractions = [point.fraction for point in report.curve]
    return float(np.interp(report.k / report.numel, fractions, [point.coverage for point in report.curve]))


def parts_of(report: MaskEvidence, order: MaskOrder) -> list[tuple[str, list[MaskPart]]]:
    """Return the parts of a mask by kind of linear, by decoder layer and by tensor."""
    ways: tuple[tuple[str, Callable[[TensorRow], str]], ...] = (
        ("Kind", _kind_of),
        ("Layer", lambda row: _layer_words(row.name)),
        ("Tensor", lambda row: row.name),
    )
    found = []
    for heading, name_of in ways:
        groups: dict[str, list[TensorRow]] = {}
        for row in report.tensors:
            groups.setdefault(name_of(row), []).append(row)
        parts = [_part(name, tensors) for name, tensors in groups.items()]
        if order is not MaskOrder.LAYER:
            parts.sort(key=attrgetter(order.value), reverse=True)
        found.append((heading, parts))
    return found


def _part(name: str, tensors: list[TensorRow]) -> MaskPart:
    count, weights = sum(row.count for row in tensors), sum(math.prod(row.shape) for row in tensors)
    score = sum(row.score for row in tensors)
    density = count / weights if weights else 0.0
    held = sum(row.coverage * row.score for row in tensors)
    return MaskPart(name=name, count=count, density=density, coverage=held / score if score else density)


def _kind_of(row: TensorRow) -> str:
    """Return the name of a linear within its layer, for example `self_attn.q_proj`."""
    _, found, rest = row.name.partition("layers.")
    return (rest.partition(".")[2] if found else row.name).removesuffix(".weight")


def _layer_words(name: str) -> str:
    layer = layer_of(name)
    return "outside of the layers" if layer is None else f"layer {layer}"


def _fraction(power: int) -> str:
    return f"{100 * 10.0**power:g} %"
