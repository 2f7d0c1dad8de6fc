"""What first-order training shows of a task decides what else is measured of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille_lab.benchmarks.cells import Cells
from permille_lab.benchmarks.evidence import main
from permille_lab.benchmarks.evidence_cells import FigureCells
from permille_lab.benchmarks.evidence_plan import Materials, Unit
from permille_lab.benchmarks.evidence_planner import Planner
from permille_lab.benchmarks.evidence_prior import Learned, learned, settings
from permille_lab.benchmarks.evidence_records import read_records
from permille_lab.benchmarks.evidence_runner import Runner
from permille_lab.evaluate.sweep_results import PROCEDURE
from tests.evidence_files import arguments

ITEMS = [f"t:{n}" for n in range(400)]
LABELS = [int(n % 10 < 4) for n in range(400)]
"""Two of five are the second answer, of two tokens where the first has one."""


def guess(share: float) -> list[float]:
    """Losses of one guess for every prompt, which gives so much to the second answer."""
    return [-np.log(share) / 2 if label else -np.log(1 - share) for label in LABELS]


BEST = (0.4 / 2) / (0.4 / 2 + 0.6)
BELOW = [loss - 0.1 * (n // 10 % 3) for n, loss in enumerate(guess(BEST))]
PRIOR_LOSS = float(np.mean(guess(BEST)))
PRIOR: dict[str, Any] = {"loss": PRIOR_LOSS, "items": ITEMS, "labels": LABELS, "item_losses": guess(BEST)}
NOTHING = Learned(method="fo:lora-8", loss=0.5, prior=0.5, p_loss=0.4, right=0.5, guessed=0.5, p_right=0.5)


def reference(
    method: str, seed: int, losses: list[float], correct: str, *, validation_loss: float = 1.0
) -> dict[str, Any]:
    return {
        "task": "rte",
        "method": method,
        "seed": seed,
        "items": ITEMS,
        "item_losses": losses,
        "correct": correct,
        "majority": 0.6,
        "validation_loss": validation_loss,
    }


def references(losses: list[float], correct: str, *, other: float = 0.0) -> list[dict[str, Any]]:
    """Three seeds of a method, and of one that validation likes less (or more: `other`)."""
    first = [reference("fo:lora-8", seed, losses, correct) for seed in range(3)]
    lucky = [0.01 for _ in ITEMS]
    worse = [
        reference("fo:sensitive-c4", seed, lucky, "1" * 400, validation_loss=2.0 - other) for seed in range(3)
    ]
    return [*first, *worse]


@pytest.mark.parametrize("share", [0.05, 0.2, BEST - 0.01, BEST, BEST + 0.01, 0.3, 0.4, 0.7])
def test_no_guess_that_is_the_same_for_every_prompt_shows_anything(share: float) -> None:
    correct = "".join(str(int(label == int(share > 0.5))) for label in LABELS)
    found = learned(PRIOR, references(guess(share), correct), 3)
    assert found is not None
    assert (found.method, found.shown) == ("fo:lora-8", False)
    assert found.right == pytest.approx(0.5)
    assert found.prior is not None
    assert found.loss >= found.prior - 1e-9
    assert str(found).startswith("not shown: fo:lora-8 ends at ")


def test_what_tells_answers_apart_is_shown_though_its_loss_is_above_the_guess() -> None:
    correct = "".join("1" if n % 5 else "0" for n in range(400))
    found = learned(PRIOR, references([loss + 0.1 for loss in guess(BEST)], correct), 3)
    assert found is not None
    assert found.p_loss is not None
    assert found.p_loss > 0.9
    assert found.right == pytest.approx(0.5 * (1 - 40 / 240) + 0.5 * (1 - 40 / 160))
    assert found.shown
    assert str(found).startswith("learned: ")


@pytest.mark.parametrize(("right", "shown"), [(0.5, False), (0.6, False), (0.63, False), (0.75, True)])
def test_where_answers_differ_by_example_the_more_frequent_place_is_the_guess(
    right: float, shown: bool
) -> None:
    """Whatever the loss: knowing a text's words is not reading its question."""
    correct = "".join(str(int(n % 100 < 100 * right)) for n in range(400))
    found = learned({"loss": None}, references([0.01] * 400, correct), 3)
    assert found is not None
    assert (found.method, found.shown) == ("fo:lora-8", shown)
    assert found.right == pytest.approx(right)
    assert found.guessed == 0.6
    verdict = "learned" if shown else "not shown"
    assert str(found).startswith(f"{verdict}: fo:lora-8 is right in {100 * right:.1f} %, ")


def test_a_loss_below_the_guess_is_shown_and_validation_chooses_the_method() -> None:
    everywhere_first = "".join(str(1 - label) for label in LABELS)
    found = learned(PRIOR, references(BELOW, everywhere_first), 3)
    assert found is not None
    assert (found.method, found.shown) == ("fo:lora-8", True)
    assert found.loss == pytest.approx(np.mean(BELOW))
    found = learned(PRIOR, references(BELOW, everywhere_first, other=1.5), 3)
    assert found is not None
    assert found.method == "fo:sensitive-c4"


def test_it_is_not_known_without_a_guess_with_too_few_seeds_or_of_other_items() -> None:
    found = references(guess(BEST), "1" * 400)
    assert learned(None, found, 3) is None
    assert learned(PRIOR, [record | {"correct": None} for record in found], 3) is None
    assert learned(PRIOR, found[1:], 3) is None
    assert learned(PRIOR | {"items": ["x", *ITEMS[1:]]}, found, 3) is None


@pytest.fixture
def two_tasks(materials_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """RTE is no first task; its references have three seeds."""
    folder = materials_file.parent
    tasks = {name: {"train": folder / "train.tsv"} for name in ("sst2", "rte")}
    materials = Materials(models=(folder / "tiny",), tasks=tasks, corpus=folder / "corpus.jsonl")
    runner = Runner(materials, tmp_path, quick=True)
    small = runner.planner.size(folder / "tiny")
    monkeypatch.setattr(runner.planner, "size", lambda _: replace(small, seeds=(0, 1, 2)))
    return runner


def write_references(runner: Runner, losses: list[float]) -> None:
    """As a sweep would have left them, and the guess."""
    model = runner.materials.models[0]
    unit = runner.planner.planned("table", model, "rte")[0]
    Cells(runner.folder / "cells-tiny.jsonl").keep("prior", settings(unit), PRIOR)
    runner._describe(unit)
    cells = [
        {"kind": "cell", "model": "tiny", "base": "bf16"} | record
        for record in references(losses, "".join(str(1 - label) for label in LABELS))
    ]
    lines = [{"kind": "sweep", "key": "x", "procedure": PROCEDURE}, *cells]
    runner._results(unit).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_of_a_task_of_which_nothing_is_shown_only_references_are_measured(
    two_tasks: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []

    def sweep(_: Runner, unit: Unit) -> None:
        began.append(unit.name.removeprefix("table-tiny-"))

    monkeypatch.setattr(Runner, "_sweep", sweep)
    monkeypatch.setattr(FigureCells, "measure", lambda _, stage, *__: began.append(stage))
    (two_tasks.folder / "sweeps").mkdir()
    model = two_tasks.materials.models[0]
    two_tasks.run("table", model, "rte")
    assert (began[:2], len(began)) == (["prior", "rte-references"], 11)  # not known yet
    for losses, parts in ((BELOW, 10), (guess(BEST), 1)):
        write_references(two_tasks, losses)
        began.clear()
        two_tasks.run("table", model, "rte")
        assert (began[:2], len(began)) == (["prior", "rte-references"], 1 + parts)
    # It is asked as soon as the references are there, in the same call.
    two_tasks._results(two_tasks.planner.planned("table", model, "rte")[0]).unlink()

    def sweep_and_write(runner: Runner, unit: Unit) -> None:
        sweep(runner, unit)
        write_references(runner, guess(BEST))

    monkeypatch.setattr(Runner, "_sweep", sweep_and_write)
    began.clear()
    two_tasks.run("table", model, "rte")
    assert began == ["prior", "rte-references"]
    monkeypatch.setattr(Runner, "_sweep", sweep)
    began.clear()
    two_tasks.run("table", model, "sst2")
    assert len(began) == 10  # the first one has all methods
    # What was measured before is shown and kept; nobody is told to wait for the rest of it.
    everything = two_tasks.planner.all_planned()
    rte = {unit.name for unit in two_tasks.planner.wanted(everything) if unit.task == "rte"}
    assert rte == {"table-tiny-rte-references"}
    assert "table-tiny-rte-pairs" in {unit.name for unit in everything}


def test_the_page_tells_the_guess_and_what_is_shown(
    evidence: Path, materials_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (evidence / "cells-tiny.jsonl").read_text().splitlines()
    cell = next(found for found in map(json.loads, lines) if found["figure"] == "prior")
    assert cell["settings"] == {"model": "tiny", "task": "sst2", "sizes": [8, 4, 32]}
    records = [record for record in read_records(evidence) if record["task"] == "sst2"]
    (items,) = {tuple(record["items"]) for record in records}
    assert cell["result"]["items"] == list(items)
    assert {record["prior_loss"] for record in records} == {cell["result"]["loss"]}
    page = (evidence / "page/evidence.md").read_text()
    assert f"; prior {cell['result']['loss']:.3f}" in page
    assert "## What tasks can tell" not in page  # one seed says nothing
    output = evidence.parent / "told"
    monkeypatch.setattr(Planner, "learned", lambda *_: NOTHING)
    monkeypatch.setattr(Planner, "learned_in_longer_runs", lambda *_: replace(NOTHING, p_right=0.001))
    assert main(arguments(materials_file, evidence, "--page", "--output", str(output))) == 0
    told = (output / "evidence.md").read_text()
    assert "- sst2, tiny: not shown: fo:lora-8 ends at 0.500 nats a token" in told
    assert "- sst2, tiny, 5 times the steps: learned: fo:lora-8 ends at 0.500 nats a token" in told


def test_longer_runs_say_what_training_shows_of_the_first_task(
    two_tasks: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the methods that they have; of other tasks there are none."""
    (two_tasks.folder / "sweeps").mkdir()
    model, planner = two_tasks.materials.models[0], two_tasks.planner
    monkeypatch.setattr(planner, "_guess", lambda _: PRIOR)
    (own,) = (unit for unit in planner.planned("longer", model, "sst2") if "references" in unit.name)
    correct = "".join(str(1 - label) for label in LABELS)
    of_longer = [record | {"unit": own.name} for record in references(BELOW, correct)]
    first = [record for record in of_longer if record["method"] == "fo:lora-8"]
    found = planner.learned_in_longer_runs(model, "sst2", first)
    assert found is not None
    assert (found.shown, found.method) == (True, "fo:lora-8")
    assert planner.learned_in_longer_runs(model, "sst2", first[1:]) is None
    assert planner.learned(model, "sst2", of_longer) is None  # its own references are to come
    assert planner.learned_in_longer_runs(model, "rte", first) is None
