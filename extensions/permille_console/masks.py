"""The report of a mask as its page shows it: the coverage curve, and tables by kind, layer and tensor."""

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
    """A point of the coverage curve: the weights with the highest scores, and their share of the total score.

    Attributes:
        fraction: how many weights there are, as a fraction of all weights.
        coverage: the sum of their scores, as a fraction of the sum of all scores.
    """

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


class BaseEvidence(BaseModel):
    """The loss of the base on the corpus, in nats per token, and warnings about it."""

    loss: float
    remarks: list[str]


class MaskEvidence(BaseModel):
    """The report that the job of a mask has written."""

    k: int
    numel: int
    coverage: float
    curve: list[CurvePoint]
    tensors: list[TensorRow]
    base: BaseEvidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The coverage curve as an SVG polyline. The x axis has the fraction of the weights, and is logarithmic.

    Attributes:
        points: the points of the polyline.
        marks: the positions of the powers of ten on the x axis, with their labels.
        density_x: the position of the mask's density on the x axis.
    """

    points: str
    marks: tuple[tuple[float, str], ...]
    density_x: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPart:
    """The part of a mask in a tensor, or in all tensors of a layer or of a kind.

    Attributes:
        count: the number of selected weights.
        density: the selected weights, as a fraction of all weights of these tensors.
        coverage: the scores of the selected weights, as a fraction of all scores of these tensors.
    """

    name: str
    count: int
    density: float
    coverage: float


class MaskOrder(StrEnum):
    """Order of the parts of a mask: as in the model, or with the largest density or coverage first."""

    LAYER = "layer"
    DENSITY = "density"
    COVERAGE = "coverage"


def curve_of(report: MaskEvidence) -> Curve | None:
    """Return the coverage curve of a report, or None if the report has no points to draw."""
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
    """Return the coverage that a mask of the same size would have if it selected the weights with the highest
    scores, from all tensors in scope together.

    Return None if the report has no curve.
    """
    if not report.curve or not report.numel:
        return None
    fractions = [point.fraction for point in report.curve]
    return float(np.interp(report.k / report.numel, fractions, [point.coverage for point in report.curve]))


def parts_of(report: MaskEvidence, order: MaskOrder) -> list[tuple[str, list[MaskPart]]]:
    """Return the parts of a mask in three tables: by kind of linear layer, decoder layer, and tensor."""
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
    """Return the name of a linear layer within its decoder layer, for example `self_attn.q_proj`."""
    _, found, rest = row.name.partition("layers.")
    return (rest.partition(".")[2] if found else row.name).removesuffix(".weight")


def _layer_words(name: str) -> str:
    layer = layer_of(name)
    return "outside of the layers" if layer is None else f"layer {layer}"


def _fraction(power: int) -> str:
    return f"{100 * 10.0**power:g} %"
