"""What first-order training learned decides what else is measured of a task."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.evidence import main
from benchmarks.evidence_plan import Materials, Unit
from benchmarks.evidence_prior import Learned, learned
from benchmarks.evidence_records import read_records
from benchmarks.evidence_runner import Runner
from tests.evidence_files import arguments

ITEMS = [f"t:{n}" for n in range(40)]
PRIOR = ({"model": "m", "task": "rte"}, {"loss": 0.5, "items": ITEMS, "item_losses": [0.4, 0.6] * 20})
FORM = Learned(method="fo:lora-8", loss=0.5, prior=0.5, p_below=0.4)


def reference(method: str, loss: float, seed: int, *, validation_loss: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng([seed, len(method)])
    return {
        "stage": "table",
        "base": "bf16",
        "model": "m",
        "task": "rte",
        "method": method,
        "seed": seed,
        "items": ITEMS,
        "item_losses": list(loss + 0.02 * rng.standard_normal(len(ITEMS))),
        "validation_loss": validation_loss,
    }


def references(sensitive: float, lora: float, **changed: float) -> list[dict[str, Any]]:
    return [
        *(reference("fo:sensitive-c4", sensitive, seed) for seed in range(3)),
        *(reference("fo:lora-8", lora, seed, **changed) for seed in range(3)),
    ]


def test_below_the_frequencies_something_was_learned() -> None:
    found = learned("m", "rte", [PRIOR], references(0.2, 0.3, validation_loss=2.0), 3)
    assert found is not None
    assert (found.method, found.prior, found.form_only) == ("fo:sensitive-c4", 0.5, False)
    assert found.loss == pytest.approx(0.2, abs=0.01)
    assert str(found).startswith("fo:sensitive-c4 ends at 0.197 nats a token")
    assert str(found).endswith("): learned")


def test_at_the_frequencies_it_is_the_form_alone() -> None:
    # The best one by validation is judged, not the one with the luckiest test items.
    found = learned("m", "rte", [PRIOR], references(0.2, 0.5, validation_loss=0.5), 3)
    assert found is not None
    assert (found.method, found.form_only) == ("fo:lora-8", True)
    assert str(found).endswith(": the form alone")


def test_it_is_not_known_without_frequencies_or_with_too_few_seeds() -> None:
    records = references(0.5, 0.5)
    assert learned("m", "rte", [], records, 3) is None
    assert learned("m", "rte", [(PRIOR[0], {"loss": None})], records, 3) is None
    assert learned("m", "rte", [PRIOR], records[:-1], 3) is None
    assert learned("m", "sst2", [PRIOR], records, 3) is None


def test_of_a_task_with_the_form_alone_only_references_are_measured(
    materials_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = materials_file.parent
    model, files = folder / "tiny", {"train": folder / "train.tsv"}
    tasks = {"sst2": files, "rte": files}
    runner = Runner(
        Materials(models=(model,), tasks=tasks, corpus=folder / "corpus.jsonl"), tmp_path, quick=True
    )
    began: list[str] = []

    def sweep(_: Runner, unit: Unit) -> None:
        began.append(unit.name.removeprefix("table-tiny-"))

    monkeypatch.setattr(Runner, "_sweep", sweep)
    for known, expected in (
        (None, 8),
        (replace(FORM, p_below=0.001), 8),
        (FORM, ["rte-references"]),
    ):
        monkeypatch.setattr(Runner, "learned", lambda *_, known=known: known)
        began.clear()
        runner.run("table", model, "rte")
        assert began == expected if isinstance(expected, list) else len(began) == expected
    began.clear()
    runner.run("table", model, "sst2")
    assert len(began) == 8  # the first one has all methods
    # What was measured before stays on the page.
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps/table-tiny-rte-pairs.jsonl").touch()
    names = {unit.name for unit in runner._all_planned() if unit.task == "rte"}
    assert names == {f"table-tiny-rte-{part}" for part in ("references", "pairs")}


def test_the_page_tells_the_frequencies_and_what_was_learned(
    evidence: Path, materials_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (evidence / "cells-tiny.jsonl").read_text().splitlines()
    cell = next(found for found in map(json.loads, lines) if found["figure"] == "prior")
    assert cell["settings"] == {"model": "tiny", "task": "sst2", "sizes": [8, 4, 32]}
    (items,) = {tuple(r["items"]) for r in read_records(evidence) if r["task"] == "sst2"}
    assert cell["result"]["items"] == list(items)
    assert len(cell["result"]["item_losses"]) == len(items)
    page = (evidence / "page/evidence.md").read_text()
    assert f"; prior {cell['result']['loss']:.3f}" in page
    assert "What tasks can tell" not in page  # one seed says nothing
    output = evidence.parent / "told"
    monkeypatch.setattr(Runner, "learned", lambda *_: FORM)
    assert main(arguments(materials_file, evidence, "--page", "--output", str(output))) == 0
    told = (output / "evidence.md").read_text()
    assert "- sst2, tiny: fo:lora-8 ends at 0.500 nats a token" in told
