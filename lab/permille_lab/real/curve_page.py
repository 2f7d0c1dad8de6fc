"""Tables and picture of docs/results/prompt-or-training.md, from finished cells of `curve`.

A cell that was not measured is a dash. `chosen` is the model that the agent makes of a text of this length:
the memory below 700 tokens, both below 5,400, else the one with the lowest loss on the select part. A
model with a memory is left out if it spoils an answer.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from permille_lab.measuring.cells import Cells, Result, Settings
from permille_lab.measuring.tables import markdown
from permille_lab.real.page import State

MISSING = "–"
WRITTEN = ("pepys", "muir", "GLOUCESTER")
"""Texts with an order."""
PEOPLE = (
    "gardener",
    *("611291", "618", "61661", "61673", "61839", "611305", "611025", "6134", "61899", "611295"),
)
SIZES = (500, 1_000, 3_000, 10_000, 30_000)
PROMPTS = (1_024, 2_048)
MEMORY = 1_024
LITTLE_TOKENS = 700
_LINES = ("base", "prompt", "state", "memory", "both")
_WIDTH, _HEIGHT = 300.0, 260.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 290.0, 34.0, 222.0


@dataclass(frozen=True, slots=True)
class Point:
    """Results of all contenders that got the same newest tokens of a text. None was not measured."""

    text: str
    tokens: int
    results: Mapping[str, Result | None]

    def loss(self, name: str, field: str = "nats") -> float | None:
        """Return a loss of a contender in nats per token, or None if it was not measured."""
        found = self.results.get(name)
        return None if found is None else found.get(field)

    @property
    def prompt(self) -> float | None:
        """The lowest loss of all prompts."""
        found = [self.loss(f"prompt {size}") for size in PROMPTS]
        return min((loss for loss in found if loss is not None), default=None)

    @property
    def chosen(self) -> str:
        """Name of the model that the agent makes of this text."""
        if self.tokens < LITTLE_TOKENS:
            return "memory"
        fitting = [*filter(self._keeps_answers, ("both", "memory")), "state"]
        select = {name: self.loss(name, "select") for name in fitting}
        measured = {name: loss for name, loss in select.items() if loss is not None}
        return min(measured, key=measured.__getitem__) if len(measured) == len(select) else fitting[0]

    def _keeps_answers(self, name: str) -> bool:
        found = self.results.get(name)
        return found is None or not found.get("fault")


def tables(results: Path) -> dict[str, str]:
    """Return the tables by their names in the template."""
    cells, real = Cells(results / "curve.jsonl"), Cells(results / "real.jsonl")
    points = [point for text in WRITTEN for point in _points(cells, text)]
    people = [point for text in PEOPLE for point in _points(cells, text)[-1:]]
    return {
        "curve": markdown(map(_losses, filter(_is_begun, points))),
        "general": markdown(map(_rises, filter(_is_trained, [*points, *people]))),
        "people": markdown(map(_chosen, people)),
        "whole": markdown(_whole(real)),
        "positions": markdown(_positions(cells)),
        "strengths": markdown(_strengths(cells)),
        "missing": _missing(points, people),
    }


def picture(results: Path) -> str:
    """Return the curves of the three long texts as SVG."""
    cells = Cells(results / "curve.jsonl")
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    panels = [_panel(place, text, _points(cells, text)) for place, text in enumerate(WRITTEN)]
    return templates.get_template("curve.svg").render(panels=panels, names=_LINES, width=_WIDTH)


def _points(cells: Cells, text: str) -> list[Point]:
    """Return the points of a text: the planned ones, and its whole length if it is shorter."""
    found: dict[tuple[str, int], Result] = {}
    for figure in ("prompt", "memory", "state", "both"):
        for settings, result in cells.of(figure):
            if settings["text"] == text and settings.get("positions", MEMORY) == MEMORY:
                found[figure, settings["tokens"]] = result
    base = next((result for settings, result in cells.of("base") if settings["text"] == text), None)
    measured = {tokens for figure, tokens in found if figure != "prompt"}
    # A size that is not planned is a whole text, and there is no larger one.
    whole = min(measured - {*SIZES}, default=math.inf)
    planned = measured | {size for size in SIZES if size < whole} if text in WRITTEN else measured
    points = []
    for tokens in sorted(planned):
        results = {"base": base} | {name: found.get((name, tokens)) for name in ("memory", "state", "both")}
        results |= {f"prompt {size}": found.get(("prompt", min(size, tokens))) for size in PROMPTS}
        points.append(Point(text, tokens, results))
    return points


def _number(loss: float | None) -> str:
    return MISSING if loss is None else f"{loss:.3f}"


def _losses(point: Point) -> dict[str, str]:
    prompts = {f"prompt of {size:,}": f"prompt {size}" for size in PROMPTS}
    names = {"base": "base"} | prompts | {name: name for name in ("state", "memory", "both")}
    row = {"text": point.text, "tokens": f"{point.tokens:,}"}
    return row | {column: _number(point.loss(name)) for column, name in names.items()}


def _is_begun(point: Point) -> bool:
    return any(result is not None for name, result in point.results.items() if name != "base")


def _is_trained(point: Point) -> bool:
    return point.results["state"] is not None


def _rises(point: Point) -> dict[str, str]:
    base, state = point.loss("base", "general"), point.results["state"]
    row = {"text": point.text, "tokens": f"{point.tokens:,}", "base": _number(base)}
    for name in ("state", "memory", "both"):
        found = point.loss(name, "general")
        row[name] = MISSING if found is None or base is None else f"{found - base:+.3f}"
    details = {} if state is None else {"strength": f"{state['strength']}/8", "steps": f"{state['steps']}"}
    return row | details | {"seconds": MISSING if state is None else f"{state['train_s']:.0f}"}


def _chosen(point: Point) -> dict[str, str]:
    chosen, prompt = point.loss(point.chosen), point.prompt
    row = {"person": point.text, "tokens": f"{point.tokens:,}", "base": _number(point.loss("base"))}
    row |= {"prompt": _number(prompt)}
    row |= {name: _number(point.loss(name)) for name in ("state", "memory", "both")}
    difference = MISSING if chosen is None or prompt is None else f"{chosen - prompt:+.3f}"
    return row | {"chosen": point.chosen, "chosen - prompt": difference}


def _whole(real: Cells) -> Iterator[dict[str, str]]:
    """Yield the losses of each person with the whole text in the context, from the cells of `real`."""
    for settings, result in real.of("people"):
        nats = result["nats"]
        prompt, both = nats[State.PROMPT.value], nats[State.BOTH.value]
        yield {
            "person": settings["user"],
            "tokens": f"{result['train_tokens']:,}",
            "base": _number(nats[State.BASE.value]),
            "state": _number(nats[State.OWN.value]),
            "text": _number(prompt),
            "text and state": _number(both),
            "gain of the state": f"{prompt - both:+.3f}",
        }


def _positions(cells: Cells) -> Iterator[dict[str, str]]:
    """Yield the sizes of the memories of each text that has several."""
    both = {_place(settings): result for settings, result in cells.of("both")}
    found = [(_place(settings), result) for settings, result in cells.of("memory")]
    texts = Counter(place[:2] for place, _ in found)
    for place, result in sorted(found, key=lambda cell: cell[0]):
        if texts[place[:2]] > 1:
            yield {
                "text": place[0],
                "tokens": f"{place[1]:,}",
                "positions": f"{place[2]:,}",
                "file": f"{result['bytes'] / 1e6:.1f} MB",
                "memory": _number(result["nats"]),
                "both": _number(both[place]["nats"] if place in both else None),
            }


def _strengths(cells: Cells) -> Iterator[dict[str, str]]:
    """Yield the losses of each state beside its memory, at the strength that it has alone and at its own."""
    beside = {_place(settings): result for settings, result in cells.of("both")}
    for settings, alone in sorted(cells.of("strength"), key=lambda cell: _place(cell[0])):
        both = beside.get(_place(settings))
        if both is not None and settings["positions"] == MEMORY:
            yield {
                "text": settings["text"],
                "tokens": f"{settings['tokens']:,}",
                "alone": f"{alone['strength']}/8",
                "both as alone": _number(alone["nats"]),
                "beside": f"{both['strength']}/8",
                "both": _number(both["nats"]),
                "general": f"{both['general'] - alone['general']:+.3f}",
            }


def _place(settings: Settings) -> tuple[str, int, int]:
    return settings["text"], settings["tokens"], settings["positions"]


def _missing(points: list[Point], people: list[Point]) -> str:
    """Name the trainings that were not run."""
    left: dict[str, list[str]] = {}
    for point in points:
        if point.tokens > SIZES[0] and not _is_trained(point):
            left.setdefault(point.text, []).append(f"{point.tokens:,}")
    trained = {point.text for point in people if _is_trained(point)}
    named = [f"{text} with {', '.join(sizes)} tokens" for text, sizes in left.items()]
    if untrained := [name for name in PEOPLE if name not in trained]:
        named.append(f"the whole text of {', '.join(untrained)}")
    return f"Not measured yet: {'; '.join(named)}." if named else "All planned trainings were run."


def _panel(place: int, text: str, points: list[Point]) -> dict[str, object]:
    """Return the coordinates of a text's curves."""
    series: dict[str, list[tuple[int, float]]] = {name: [] for name in _LINES}
    for point in points:
        for name in _LINES:
            loss = point.prompt if name == "prompt" else point.loss(name)
            if loss is not None:
                series[name].append((point.tokens, loss))
    losses = [loss for line in series.values() for _, loss in line] or [0.0]
    low, high = min(losses), max(losses)
    first, last = SIZES[0], SIZES[-1]

    def place_of(tokens: int, loss: float) -> tuple[float, float]:
        x = _LEFT + (_RIGHT - _LEFT) * math.log(tokens / first) / math.log(last / first)
        y = _TOP + (_BOTTOM - _TOP) * ((high - loss) / (high - low) if high > low else 0.5)
        return round(place * _WIDTH + x, 1), round(y, 1)

    return {
        "name": text,
        "x": place * _WIDTH,
        "low": f"{low:.2f}",
        "high": f"{high:.2f}",
        "ticks": [(f"{size:,}", place_of(size, low)[0]) for size in SIZES],
        "lines": {name: [place_of(*point) for point in line] for name, line in series.items() if line},
    }
