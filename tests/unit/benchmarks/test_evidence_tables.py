"""What the tables of the evidence say while a run is unfinished."""

from pathlib import Path

import pytest

from permille_lab.benchmarks.evidence_materials import find_materials
from permille_lab.benchmarks.evidence_pictures import fraction_pictures
from permille_lab.benchmarks.evidence_plan import QUICK, units
from permille_lab.benchmarks.evidence_records import unfinished_claims
from permille_lab.benchmarks.evidence_runner import Runner
from permille_lab.benchmarks.evidence_tables import (
    begun_anew,
    budget_table,
    method_table,
    setting_table,
    short_table,
    turn_table,
    verdict_table,
)
from permille_lab.evaluate.claims import verdicts
from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.paper_claims import CLAIMS
from tests.evidence_files import measured_elsewhere
from tests.tiny_model import write_corpus, write_model

ITEMS = 100


def cells(method: str, share: float, *, task: str = "sst2", seeds: int = 3) -> list[Json]:
    right = round(ITEMS * share)
    return [
        {
            "model": "m",
            "base": "bf16",
            "method": method,
            "task": task,
            "seed": seed,
            "stage": "table",
            "density": 0.001,
            "queries": 16,
            "accuracy": share,
            "loss": 1 - share,
            "validation_loss": 1 - share,
            "majority": 0.5,
            "on_edge": False,
            "cut_examples": 0,
            "shots": 0.0,
            "examples": {"train": 8, "validation": 4, "test": ITEMS},
            "items": [str(number) for number in range(ITEMS)],
            "correct": "1" * right + "0" * (ITEMS - right),
        }
        for seed in range(seeds)
    ]


def ranks(lines: list[str]) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[1]: row[-2:] for row in rows}


@pytest.mark.parametrize(
    ("references", "head"),
    [
        ([*cells("zero-shot", 0.5), *cells("fo:lora-8", 0.9)], " sst2 (majority"),
        ([*cells("zero-shot", 0.5), *cells("fo:lora-8", 0.51)], " *sst2* (majority"),
        (cells("zero-shot", 0.5), " sst2? (majority"),
    ],
)
def test_a_task_counts_does_not_or_is_not_known_yet(references: list[Json], head: str) -> None:
    found = [*references, *cells("zo:full", 0.6)]
    assert head in method_table(found, found, {})[0]


def test_ranks_are_over_the_seeds_that_all_have_and_wait_for_three() -> None:
    references = [*cells("zero-shot", 0.5), *cells("fo:lora-8", 0.9)]
    more = cells("zo:full", 0.6, seeds=5)
    for record in more[3:]:
        record["accuracy"], record["loss"] = 1.0, 0.0  # seeds of its own say nothing of the others
    found = [*references, *more]
    expected = {"fo:lora-8": ["1.0", "1.0"], "zo:full": ["2.0", "2.0"], "zero-shot": ["3.0", "3.0"]}
    assert ranks(method_table(found, found, {})) == expected
    lines = method_table([*found, *cells("zo:random", 0.7, seeds=2)], found, {})
    assert {tuple(rank) for rank in ranks(lines).values()} == {("", "")}


def test_a_task_that_some_methods_lack_ranks_none() -> None:
    found = [*cells("zero-shot", 0.5), *cells("fo:lora-8", 0.9), *cells("zo:full", 0.6)]
    of_one = ranks(method_table(found, found, {}))
    assert ranks(method_table([*found, *cells("zo:full", 1.0, task="rte")], found, {})) == of_one
    of_both = [*found, *cells("zero-shot", 0.5, task="rte"), *cells("fo:lora-8", 0.5, task="rte")]
    of_both += cells("zo:full", 1.0, task="rte")
    assert ranks(method_table(of_both, found, {}))["zo:full"][-1] == "1.5"


def test_cells_name_a_step_on_the_edge_and_runs_that_began_anew() -> None:
    found = cells("zo:full", 0.6)
    assert "(0.400)" in setting_table(found, "queries", "q =")[2]
    found[1]["on_edge"] = True
    for table in (setting_table(found, "queries", "q ="), method_table(found, found, {})):
        assert "(0.400, edge)" in table[2]
    attempts = [record | {"attempts": count} for record, count in zip(found, (1, 3, None), strict=True)]
    assert begun_anew(attempts, "queries", "q =") == "q = 16, 1 of 2 runs"


def test_a_table_tells_cut_prompts_and_shots_that_found_no_room() -> None:
    found = [record | {"cut_examples": 88} for record in cells("zero-shot", 0.5)]
    found += [record | {"shots": record["seed"] / 10} for record in cells("icl:8", 0.5)]
    lines = method_table(found, found, {})
    assert " sst2? (majority 50.0; 88 % cut) " in lines[0]
    assert "| bf16 | icl:8 | 50.0 ± 0.0 (0.500, 0.1 shots fitted) |" in lines[3]
    assert "cut" not in method_table(cells("zero-shot", 0.5), [], {})[0]


def test_a_claim_that_holds_does_so_far_while_cells_are_missing(materials_file: Path) -> None:
    model = materials_file.parent / "tiny"
    planned = units("table", model, "sst2", QUICK, fractions=())
    done = [
        {"unit": unit.name, "method": name}
        for unit in planned
        for name in unit.choices["methods"]
        for _ in unit.choices["seeds"]
    ]
    assert unfinished_claims(planned, done) == set()
    assert unfinished_claims(planned, []) == {claim.key for claim in CLAIMS if claim.stage is None}
    lacking = [line for line in done if line["method"] != "zo:outliers"]
    assert unfinished_claims(planned, lacking) == {"sensitive-outliers"}
    others = units("queries", model, "sst2", QUICK, fractions=())
    assert unfinished_claims(others, []) == {claim.key for claim in CLAIMS if claim.stage == "queries"}
    found = [*cells("zero-shot", 0.5), *cells("fo:lora-8", 0.9)]
    for method, share in (("zo:sensitive-c4", 0.9), ("zo:random", 0.5)):
        found += [record | {"groups": record["items"]} for record in cells(method, share)]
    rows = verdicts(found)
    so_far = verdict_table(rows, {"sensitive-random"})
    assert sum("**holds** so far |" in line for line in so_far) == 1
    assert sum("**holds** |" in line for line in verdict_table(rows, set())) == 1
    assert "**undecided** |" in "".join(verdict_table(rows, {"static"}))


def test_in_short_texts_and_tasks_of_each_model_stand_apart() -> None:
    def pair(task: str, better: float, **changed: object) -> list[Json]:
        found = []
        for method, share in (("zo:sensitive-c4", better), ("zo:random", 0.5)):
            for record in cells(method, share, task=task):
                loss = 1 - share
                luck = [(n * (record["seed"] + len(method)) % 7 - 3) / 1000 for n in range(ITEMS)]
                outcome = {"item_losses": [loss + one for one in luck], "loss": loss}
                found.append(record | {"groups": record["items"]} | outcome | changed)
        return found

    text = {"accuracy": None, "correct": None, "majority": None}
    found = [*pair("text", 0.9, **text), *pair("sst2", 0.4), *pair("text", 0.7, **text, density=0.01)]
    found += [*cells("zero-shot", 0.5), *cells("fo:lora-8", 0.5)]
    lines = short_table(verdicts(found))
    assert lines[0] == "| claim | m, text | m, tasks |"
    assert lines[2].endswith("| **holds** +0.400; **holds** +0.200 at 0.01 | sst2: **fails** -0.100 |")
    assert lines[3].endswith("|  |  |")
    in_order = [line for line in verdict_table(verdicts(found), set()) if "(loss of" in line]
    assert ["text" in line for line in in_order] == [True, True, False]
    assert " (fails) | worse |" in in_order[2]
    assert short_table([]) == ["Nothing has been compared yet."]


def test_budgets_tell_what_was_trained_and_where_more_might_have_helped() -> None:
    chosen = {"zo_steps": 100, "fo_steps": 50, "batch_size": 8, "max_tokens": 96}
    found = [record | chosen | {"best_step": 100} for record in cells("zo:full", 0.6)]
    found += [record | chosen | {"best_step": 40} for record in cells("fo:lora-8", 0.6)]
    found += [record | chosen | {"best_step": None, "stage": "flat"} for record in cells("zero-shot", 0.6)]
    assert budget_table(found)[2:] == [
        "| m, sst2 | table, flat | 100 | 50 | 16 | 8 | 96 | 8 | 4 | 100 | 3 of 6 |"
    ]


def test_lines_stand_in_one_order_whenever_they_were_measured() -> None:
    names = ["zero-shot", "zo:sensitive-c4", "zo:random", "zo:full", "fo:lora-8", "own"]
    found = [record for name in reversed(names) for record in cells(name, 0.6)]
    quantized = [record | {"base": "nf4"} for record in cells("zo:sensitive-c4", 0.6)]
    lines = method_table([*quantized, *found], found, {})[2:]
    own = [*(f"| bf16 | {name} |" for name in names), "| nf4 | zo:sensitive-c4 |"]
    assert [line.startswith(head) for line, head in zip(lines, own, strict=True)] == [True] * 7
    lines = setting_table(found, "queries", "q =")[2:]
    assert [line.split(" | ")[0] for line in lines] == [f"| m, sst2, {name}" for name in names]


def test_language_modelling_has_its_loss_alone() -> None:
    found = [*cells("zero-shot", 0.5), *cells("fo:lora-8", 0.9)]
    own = [
        record | {"task": "text", "accuracy": None, "majority": None, "loss": 3 + record["seed"] / 10}
        for record in cells("fo:lora-8", 0.9)
    ]
    lines = method_table([*found, *own], [*found, *own], {})
    assert " | text (loss) | " in lines[0]
    assert "| (3.100 ± 0.100) |" in lines[3]
    assert "| m, text, fo:lora-8 | (3.100 ± 0.100) |" in setting_table(own, "queries", "q =")
    told = [record | {"bits_per_byte": 2 + record["seed"]} for record in own]
    assert "| (3.100 ± 0.100; 3.000 bits per byte) |" in method_table([*found, *told], [*found, *told], {})[3]


def test_figures_of_language_modelling_show_its_loss(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    own = [
        record | {"stage": "fractions", "density": density, "task": "text", "accuracy": None}
        for record in cells("zo:sensitive-c4", 0.5)
        for density in (0.01, 0.1)
    ]
    pictures = fraction_pictures(own, {"m": tmp_path / "m"})
    assert [picture.name for picture in pictures] == ["fractions-loss"]


def test_a_claim_of_one_stage_turns_at_no_density() -> None:
    """Queries are compared in a stage of their own, at one density."""
    found = [*cells("zero-shot", 0.5), *cells("fo:lora-8", 0.9)]
    for queries, share in ((1, 0.6), (4, 0.8)):
        found += [
            record | {"stage": "queries", "queries": queries} for record in cells("zo:sensitive-c4", share)
        ]
    rows = verdicts(found, stages=("fractions",))
    assert [row.claim.key for row in rows if row.found is not None] == ["queries-sensitive-c4"]
    assert turn_table(rows) == ["No density has been compared yet."]


def test_longer_runs_stand_beside_the_tables_with_verdicts_of_their_own(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    write_corpus(tmp_path / "corpus.jsonl", rows=40)
    named = 'models = ["tiny"]\ncorpus = "corpus.jsonl"\n[tasks.text]\ntrain = "corpus.jsonl"\n'
    (tmp_path / "materials.toml").write_text(named)
    runner = Runner(find_materials(tmp_path / "materials.toml", None, tmp_path), tmp_path / "evidence")
    model = tmp_path / "tiny"
    for stage, sensitive in (("table", 0.7), ("longer", 0.4)):
        for unit in runner.planner.planned(stage, model, "text"):
            measured_elsewhere(runner, unit, loss={"zo:sensitive-c4": sensitive, "zo:random": 0.6})
    output = runner.page(tmp_path / "output")
    table = (output / "evidence.md").read_text().partition("## Longer runs")[2].partition("## Not")[0]
    assert "| model, task, method | steps 200 | steps 1000 |" in table
    assert "| tiny, text, zo:sensitive-c4 | (0.701 ± 0.001) | (0.401 ± 0.001) |" in table
    assert "| tiny, text, zo:lora-8 | (1.001 ± 0.001) | (1.001 ± 0.001) |" in table
    (claim,) = (claim for claim in CLAIMS if claim.key == "sensitive-random")
    (verdict,) = (line for line in table.splitlines() if line.startswith(f"| {claim.sentence} |"))
    assert (
        " | tiny, 0.001 | undecided (loss of text) | +0.2000 nats | " in verdict
    )  # items that are all alike
    assert "| tiny, text | longer | 1000 |" in (output / "evidence.md").read_text()
