"""The sweeps of the evidence. `permille evaluate` could run each of them, with the same results file.

A sweep has one model, one task and one setting. Finished sweeps therefore stay valid when models or tasks are
added. The number of steps depends on the model, so that all sweeps take hours and not days. The first task
(SST-2) has all stages, and people's text most of them. Of other tasks, only the references are measured,
because no method was shown to learn them with such small models (docs/results/evidence.md).

Zeroth-order methods compute `QUERIES` exact directional derivatives in a step (estimator "forward"). All of
them together cost one gradient on small models. Finite differences approximate them. On SST-2 with
stories260K, both gave nearly the same loss (0.749 and 0.747 after 200 steps of four queries).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import prod
from pathlib import Path
from typing import Any

from permille.models.families import expected_tensors, scoped_tensors
from permille.sensitivity.masks import count
from permille_lab.evaluate.specification import Sweep, sweep_of
from permille_lab.tasks.examples import Task

QUERIES = 16
DENSITY = 0.001
FRACTIONS = (1e-2, 1e-4, 1e-1, 1e-5)
"""Densities of the stage `fractions`, the most informative first. The table has the cells of `DENSITY`."""
EFFECTIVE_BATCH = 16
SEEDS, EQUIVALENCE_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)

STATIC = ("zo:sensitive-c4", "zo:sensitive-task", "zo:random", "zo:outliers")
DYNAMIC = ("zo:sensitive-task-dynamic", "zo:random-dynamic")
SEGMENTS = "zo:sensitive-task-segments"
"""One mask, trained in segments like the dynamic masks. It is their reference."""
BY_DENSITY = (*STATIC, "fo:sensitive-c4", *DYNAMIC)
TEXT_BY_DENSITY = ("zo:sensitive-c4", "zo:random", "fo:sensitive-c4")
TEXT_FRACTIONS = FRACTIONS[:3]
"""Densities for people's text. They show how many weights are worth training."""
WITHOUT_MASK = ("zo:full", "zo:lora-8", "zo:lora-fa-8", "zo:prefix-5")
RANK_16 = ("zo:lora-16", "zo:lora-fa-16")
REFERENCES = ("zero-shot", "icl:8", "fo:sensitive-c4", "fo:lora-8")
REAL_PREFIX = ("zo:prefix-real-5",)
NF4_ADAPTERS = ("zo:lora-8", *REAL_PREFIX)
"""Methods that the sensitive-sparse paper compares with sensitive weights on the same 4-bit base."""
NF4_REFERENCES = ("zero-shot", "fo:lora-8", "fo:sensitive-c4")
SCHEMES = ("int4-g32", "int4-g128", "auto-round-int4")
"""Bases of the stage `schemes`. The table has the cells of bf16 and nf4."""
SCHEME_METHODS = ("zero-shot", "zo:sensitive-c4")
LONGER = 5
"""Factor on the table's steps. In the table, nearly all runs have their lowest loss at the end."""
LONGER_METHODS: Mapping[str, tuple[str, ...]] = {
    "masks": ("zo:sensitive-c4", "zo:random"),
    "others": ("zo:lora-8", "zo:full"),
}
LONGER_REFERENCES: Mapping[str, tuple[str, ...]] = {
    "references": ("zero-shot", "fo:lora-8"),
    "masks": ("zo:sensitive-c4",),
}
"""Methods for the first task. They show whether models learn to use its prompts in more steps."""
LONG_TASKS = frozenset({"boolq", "rte"})
"""Tasks with passages. They have half the steps, fewer items and three seeds.

Three seeds are too few for claims of equality.
"""
FLAT = 0.01
"""Density at which the loss of sensitive weights hardly changes with the density, for a small model."""
SMALL = 2_000_000
"""Number of weights below which a model is small."""

STAGES = ("table", "fractions", "flat", "longer", "queries", "schemes")
_FIRST_TASK_ONLY = frozenset({"queries", "schemes"})
_OF_OTHERS = {False: ("references",), True: ("references", "pairs")}
"""Parts of the table for tasks other than the first and text. The key is True for RTE.

RTE also has the part `pairs`. It was measured before it was known that no method learns RTE. Results that
were looked at must stay in the family of tests.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """The models and texts of the evidence.

    Attributes:
        models: transformers folders.
        tasks: train file and optional test file, by task. The first task has all stages.
        corpus: JSON lines with `text`.
    """

    models: tuple[Path, ...]
    tasks: Mapping[str, Mapping[str, Path]]
    corpus: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The amount of computation in a cell.

    Attributes:
        tuning_seeds: number of tuning seeds. The stages `fractions` and `longer` have one, which suffices to
            show the shape of a curve (ADR 35). Tasks with passages also have one.
    """

    zo_steps: int
    fo_steps: int
    sizes: tuple[int, int, int] = (1000, 128, 400)
    queries: int = QUERIES
    batch_size: int = 8
    max_tokens: int = 128
    trials: int = 3
    tuning_seeds: int = 3
    evaluations: int = 5
    corpus_sequences: int = 64
    corpus_tokens: int = 128
    query_numbers: tuple[int, ...] = (1, 4, 16)
    schemes: tuple[str, ...] = SCHEMES
    seeds: tuple[int, ...] = SEEDS
    equivalence_seeds: tuple[int, ...] = EQUIVALENCE_SEEDS

    def longer(self, *, first_order: bool) -> "Size":
        """Return the size of longer runs, with a search of one seed.

        Args:
            first_order: also lengthen first-order runs.
        """
        return replace(
            self,
            zo_steps=LONGER * self.zo_steps,
            fo_steps=LONGER * self.fo_steps if first_order else self.fo_steps,
            evaluations=2 * self.evaluations,
            tuning_seeds=1,
        )

    def halved(self) -> "Size":
        """Return the size for tasks with passages."""
        train, validation, test = self.sizes
        return replace(
            self,
            zo_steps=max(1, self.zo_steps // 2),
            fo_steps=max(1, self.fo_steps // 2),
            sizes=(train, max(1, validation // 2), max(1, test * 3 // 4)),
            tuning_seeds=1,
            equivalence_seeds=self.seeds,
        )


def size_for(model: Path) -> Size:
    """Return the size for a model. Small models have 200 steps, others 100 steps and shorter examples."""
    if _weights(model) < SMALL:
        return Size(zo_steps=200, fo_steps=200)
    return Size(zo_steps=100, fo_steps=100, max_tokens=96)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One sweep.

    Attributes:
        stage: one of `STAGES`.
        choices: all keys of the sweep except models, tasks and corpus.
    """

    stage: str
    model: Path
    task: str
    name: str
    choices: Mapping[str, Any]

    def sweep(self, materials: Materials) -> Sweep:
        """Return the sweep that `permille evaluate` would run."""
        files = {part: str(path.absolute()) for part, path in materials.tasks[self.task].items()}
        found = {
            "models": [str(self.model.absolute())],
            "corpus": str(materials.corpus.absolute()),
            "tasks": {self.task: files},
            **self.choices,
        }
        return sweep_of(found, Path())


def planned(materials: Materials, size: Size | None = None) -> list[Unit]:
    """Return every sweep. The most informative ones come first.

    Args:
        size: the size for every model. By default it depends on the model (`size_for`).
    """
    first = next(iter(materials.tasks))
    return [
        unit
        for stage in STAGES
        for model in materials.models
        for task in materials.tasks
        if task == first or (task == Task.TEXT and stage not in _FIRST_TASK_ONLY) or stage == "table"
        if stage != "flat" or _weights(model) < SMALL
        for unit in units(stage, model, task, size or size_for(model))
        if task in (first, Task.TEXT)
        or unit.name.removeprefix(f"table-{model.name}-{task}-") in _OF_OTHERS[task == Task.RTE]
    ]


def units(stage: str, model: Path, task: str, size: Size) -> list[Unit]:
    """Return the sweeps of a stage for one model and task."""
    if task in LONG_TASKS:
        size = size.halved()
    many, of = size.equivalence_seeds, _Place(stage, model, task, size)
    match stage:
        case "table":
            pairs = (*STATIC, DYNAMIC[0])
            # References come first, because verdicts need them.
            return [
                of.unit("references", REFERENCES),
                of.unit("pairs", pairs, seeds=many),
                of.unit("segments", (SEGMENTS,), seeds=many),
                of.unit("full", WITHOUT_MASK[:1], seeds=many),
                of.unit("others", (*WITHOUT_MASK[1:], DYNAMIC[1])),
                of.unit("nf4", ("zo:sensitive-c4",), "nf4", seeds=many),
                of.unit("nf4-references", NF4_REFERENCES, "nf4"),
                of.unit("nf4-adapters", NF4_ADAPTERS, "nf4", seeds=many),
                of.unit("prefix", REAL_PREFIX),
                of.unit("rank-16", RANK_16),
            ]
        case "flat":
            methods, density = (*STATIC, "fo:sensitive-c4"), FLAT
            return [
                of.unit(f"{density:g}", methods, seeds=many, density=density),
                of.unit(
                    f"nf4-{density:g}", ("zo:sensitive-c4",), "nf4",
                    seeds=many, density=density,
                ),
                of.unit(
                    f"segments-{density:g}", (SEGMENTS, DYNAMIC[0]),
                    seeds=many, density=density,
                ),
            ]  # fmt: skip
        case "fractions":
            # Static masks come first, because claims depend on them.
            parts = {"static-": BY_DENSITY[: -len(DYNAMIC)], "dynamic-": DYNAMIC}
            fractions: Sequence[float] = FRACTIONS
            if task == Task.TEXT:
                parts, fractions = {"static-": TEXT_BY_DENSITY}, TEXT_FRACTIONS
            return [
                of.unit(f"{part}{at:g}", methods, density=at, tuning_seeds=1)
                for part, methods in parts.items()
                for at in _distinct(model, fractions)
            ]
        case "longer":
            named = LONGER_METHODS if task == Task.TEXT else LONGER_REFERENCES
            # Text has no first-order methods in this stage.
            of = replace(of, size=size.longer(first_order=task != Task.TEXT))
            return [of.unit(part, methods) for part, methods in named.items()]
        case "queries":
            return [
                of.unit(
                    f"q{queries}", ("zo:sensitive-c4", "zo:lora-fa-8"),
                    queries=queries, batch_size=EFFECTIVE_BATCH // queries, zo_steps=2 * size.zo_steps,
                    seeds=many,
                )
                for queries in size.query_numbers
            ]  # fmt: skip
        case "schemes":
            return [of.unit(base, SCHEME_METHODS, base) for base in size.schemes]
    raise ValueError(f"expected a stage of {', '.join(STAGES)}; got {stage!r}")


def _distinct(model: Path, fractions: Sequence[float]) -> list[float]:
    """Return the densities without those that give the same masks as an earlier one or as `DENSITY`.

    For example, in a small model 0.01 % and 0.001 % are both one weight of each tensor.
    """
    shares = {_masked_share(model, DENSITY)}
    found = []
    for density in fractions:
        if (share := _masked_share(model, density)) not in shares:
            shares.add(share)
            found.append(density)
    return found


def _masked_share(model: Path, density: float) -> float:
    """Return the actual share of masked weights at this density. Each tensor has at least one."""
    sizes = [prod(shape) for _, shape in scoped_tensors(_config(model), "all")]
    return sum(count(Decimal(str(density)), numel) for numel in sizes) / sum(sizes)


@dataclass(frozen=True, slots=True)
class _Place:
    """The values that the sweeps of a stage share for one model and task."""

    stage: str
    model: Path
    task: str
    size: Size

    def unit(
        self,
        part: str,
        methods: Sequence[str],
        base: str = "bf16",
        *,
        density: float = DENSITY,
        **changed: Any,
    ) -> Unit:
        """Return one of the sweeps.

        Args:
            changed: keys of the sweep that differ from the size.
        """
        names = (
            *("zo_steps", "fo_steps", "queries", "batch_size", "trials", "tuning_seeds", "evaluations"),
            *("sizes", "max_tokens", "corpus_sequences", "corpus_tokens", "seeds"),
        )
        choices = {name: getattr(self.size, name) for name in names} | changed
        choices |= {
            "methods": list(methods),
            "bases": [base],
            "density": density,
            "estimator": "forward",
            "refresh_steps": max(1, choices["zo_steps"] // 4),
        }
        if set(methods) & {SEGMENTS, *DYNAMIC}:
            # One segment per evaluation. Thus the best state is chosen from as many as without segments.
            choices["refresh_steps"] = max(1, choices["zo_steps"] // choices["evaluations"])
        name = f"{self.stage}-{self.model.name}-{self.task}-{part}"
        return Unit(stage=self.stage, model=self.model, task=self.task, name=name, choices=choices)


def _config(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return found


def _weights(model: Path) -> int:
    return sum(prod(shape) for shape in expected_tensors(_config(model)).values())
