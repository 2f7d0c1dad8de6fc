"""Tests of the evidence: its sweeps, the finished part, and the pages made of all results."""

import argparse
import json
import math
from pathlib import Path

import pytest

from permille.errors import InputError
from permille_lab import pages
from permille_lab.evaluate.results import read_results
from permille_lab.evaluate.sweep import run_sweep
from permille_lab.evidence import __main__ as evidence
from permille_lab.evidence import page
from permille_lab.evidence.plan import EQUIVALENCE_SEEDS, Materials, Size, planned, size_for
from permille_lab.evidence.records import by_density, describe, lacking, read_records
from tests.sweep_files import EXAMPLE_MODEL, ROOT, WORDS

RESULTS = ROOT / "lab/results"
QUICK = Size(
    zo_steps=2,
    fo_steps=2,
    sizes=(8, 4, 6),
    queries=2,
    batch_size=2,
    max_tokens=48,
    trials=1,
    tuning_seeds=1,
    evaluations=1,
    corpus_sequences=2,
    corpus_tokens=16,
    query_numbers=(1,),
    schemes=("int4-g32",),
    seeds=(0,),
    equivalence_seeds=(0,),
)


@pytest.fixture
def materials(sweep_file: Path) -> Materials:
    folder = sweep_file.parent
    texts = [
        json.dumps({"text": f"The {word} house {n}.", "group": f"p{n}"}) for n in range(9) for word in WORDS
    ]
    (folder / "text.jsonl").write_text("\n".join(texts) + "\n")
    tasks = {"sst2": {"train": folder / "train.tsv"}, "text": {"train": folder / "text.jsonl"}}
    return Materials(models=(EXAMPLE_MODEL,), tasks=tasks, corpus=folder / "corpus.jsonl")


def test_every_planned_sweep_can_be_run_and_has_a_name_of_its_own(materials: Materials) -> None:
    units = planned(materials)
    assert len({unit.name for unit in units}) == len(units)
    assert {unit.stage for unit in units} == {"table", "fractions", "flat", "longer", "queries", "schemes"}
    for unit in units:
        sweep = unit.sweep(materials)
        assert sweep.density == unit.choices["density"]
        assert [method.name for method in sweep.methods] == unit.choices["methods"]
        assert not (unit.task == "text" and unit.stage in ("queries", "schemes"))
    # Queries times rows is constant.
    assert {u.choices["queries"] * u.choices["batch_size"] for u in units if u.stage == "queries"} == {16}
    size = size_for(EXAMPLE_MODEL)
    (longer, *_) = [unit for unit in units if unit.stage == "longer"]
    assert longer.choices["zo_steps"] == 5 * size.zo_steps


def test_sides_of_an_equality_have_five_seeds(materials: Materials) -> None:
    seeds = {method: unit.choices["seeds"] for unit in planned(materials) if unit.stage == "table"
             for method in unit.choices["methods"] if unit.choices["bases"] == ["bf16"]}  # fmt: skip
    for method in ("zo:sensitive-c4", "zo:sensitive-task", "zo:full", "zo:sensitive-task-segments"):
        assert seeds[method] == EQUIVALENCE_SEEDS


def test_other_tasks_have_their_references_alone(materials: Materials) -> None:
    tasks = dict(materials.tasks) | {"copa": {"train": materials.corpus}, "rte": {"train": materials.corpus}}
    units = planned(Materials(models=materials.models, tasks=tasks, corpus=materials.corpus))
    assert [unit.name.rpartition("-")[2] for unit in units if unit.task == "copa"] == ["references"]
    assert [unit.name.rpartition("-")[2] for unit in units if unit.task == "rte"] == ["references", "pairs"]
    # The size for tasks with passages.
    assert {unit.choices["sizes"][2] for unit in units if unit.task == "rte"} == {300}


def test_a_run_is_taken_up_and_read_again(materials: Materials, tmp_path: Path) -> None:
    folder = tmp_path / "evidence"
    units = [unit for unit in planned(materials, QUICK) if unit.name.endswith("-text-segments")]
    describe(folder, units)
    assert lacking(folder, []) == {("table", EXAMPLE_MODEL.name, "text"): (0, 1)}
    (unit,) = units
    path = folder / f"{unit.name}.jsonl"
    run_sweep(unit.sweep(materials), path, lambda *_: None)
    (record,) = read_records(folder)
    assert (record["unit"], record["density"], record["method"]) == (
        unit.name,
        0.001,
        unit.choices["methods"][0],
    )
    assert len(record["items"]) == len(record["groups"]) == record["examples"]["test"]
    assert lacking(folder, [record]) == {}
    before = path.read_bytes()
    run_sweep(unit.sweep(materials), path, lambda *_: None)
    assert path.read_bytes() == before


def test_nothing_begins_after_the_minutes(materials: Materials, tmp_path: Path) -> None:
    options = argparse.Namespace(stage="table", model=None, task="sst2")
    with pytest.raises(evidence.TimeIsUpError):
        evidence.run(materials, tmp_path / "evidence", options, evidence.progress_until(-math.inf))
    assert not any(read_results(path).cells for path in (tmp_path / "evidence").glob("*.jsonl"))


def test_materials_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "materials.toml"
    path.write_text('models = ["a", "b/a"]\ncorpus = "c"\n[tasks.sst2]\ntrain = "t"\n')
    with pytest.raises(InputError, match="models of different names"):
        evidence.find_materials(path, None, tmp_path)
    path.write_text("corpus = 3")
    with pytest.raises(InputError, match="expected models, corpus and"):
        evidence.find_materials(path, None, tmp_path)
    (tmp_path / "units.json").write_text("[]")
    with pytest.raises(InputError, match="what sweeps chose"):
        read_records(tmp_path)


def test_the_committed_evidence_says_what_the_page_says() -> None:
    """The committed cells give the numbers that the pages' text contains."""
    found = page.tables(RESULTS)
    assert "| Sensitive weights train better than as many random ones" in found["claims"]
    assert "**holds** +0.353" in found["claims"] and "**fails** -0.339" in found["claims"]
    assert "5.335 ± 0.013" in found["methods"]
    densities = {record["density"] for record in by_density(read_records(RESULTS / "evidence"))}
    assert densities == {1e-5, 1e-4, 1e-3, 1e-2, 1e-1}


def test_the_pages_are_those_that_the_results_make() -> None:
    """This fails unless `make results` has run after the last change of results, templates or tables."""
    for path, text in pages.written(RESULTS).items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run `make results`"
