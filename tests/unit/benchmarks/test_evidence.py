"""The evidence in its quick form: every stage; what is killed goes on; the page says what is missing."""

import json
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.evidence import STAGES, main
from benchmarks.evidence_materials import find_materials
from benchmarks.evidence_plan import (
    DENSITY,
    DYNAMIC,
    FRACTIONS,
    QUICK,
    SWEEP_STAGES,
    Materials,
    Size,
    Unit,
    masked_share,
    size_for,
    units,
)
from benchmarks.evidence_records import SUMMARY, by_density, by_scheme, flat_density, progress, read_records
from benchmarks.evidence_runner import Runner, TimeIsUpError
from permille.errors import InputError
from permille.evaluate.cells import Json
from permille.evaluate.claims import DECIDING, EQUIVALENCE_SEEDS
from permille.evaluate.paper_claims import CLAIMS, Relation
from permille.evaluate.specification import read_sweep, sweep_of
from permille.evaluate.sweep import cells_of, open_results
from tests.tiny_model import write_corpus, write_model, write_sst2


@pytest.fixture(scope="module")
def materials_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    write_model(folder / "tiny")
    write_corpus(folder / "corpus.jsonl", rows=40)
    write_sst2(folder / "train.tsv")
    path = folder / "materials.toml"
    path.write_text('models = ["tiny"]\ncorpus = "corpus.jsonl"\n[tasks.sst2]\ntrain = "train.tsv"\n')
    return path


@pytest.fixture(scope="module")
def evidence(materials_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything has run once."""
    folder = tmp_path_factory.mktemp("evidence")
    assert main(arguments(materials_file, folder)) == 0
    return folder


def arguments(materials: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("--materials", str(materials), "--folder", str(folder), "--quick", "--threads", "1"),
        *more,
    ]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_every_stage_leaves_its_data_and_a_second_call_measures_nothing(
    evidence: Path, materials_file: Path
) -> None:
    stages = {record["stage"] for record in read_records(evidence)}
    assert stages == {
        "table",
        "fractions",
        "queries",
        "schemes",
    }  # one seed says of no density that it is flat
    cells = [json.loads(line)["figure"] for line in (evidence / "cells-tiny.jsonl").read_text().splitlines()]
    assert cells == ["coverage", "transfer", "steps"]
    assert (evidence / "memory.jsonl").exists()
    before = files_of(evidence)
    assert main(arguments(materials_file, evidence)) == 0
    assert files_of(evidence) == before


def test_the_page_concludes_nothing_from_one_seed_and_names_what_is_missing(evidence: Path) -> None:
    page = (evidence / "page/evidence.md").read_text()
    assert page.count("**undecided**") == 7
    assert "**holds**" not in page
    assert "**fails**" not in page
    assert "`flat` of tiny: waits for" in page
    assert "| model, task, method | bf16 | nf4 | squeezellm |" in page
    assert str(evidence) not in page
    for name in page.split("](figures/")[1:]:
        assert (evidence / "page/figures" / name.partition(")")[0]).read_bytes()[:4] == b"\x89PNG"
    data = json.loads((evidence / "page/evidence.json").read_text())
    assert len(data["records"]) == len(read_records(evidence))
    assert "items" not in data["records"][0]
    assert {cell["figure"] for cell in data["cells"]} == {"coverage", "transfer", "steps", "memory"}


def test_another_clone_goes_on_from_what_is_kept_beside_the_page(
    evidence: Path, materials_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same page and results, byte for byte; only the sweeps' own files name this clone's paths."""
    output, folder = tmp_path / "output", tmp_path / "evidence"
    shutil.copytree(evidence / "page", output)
    assert not any(str(materials_file.parent).encode() in found for found in files_of(output).values())
    options = arguments(materials_file, folder, "--restore", str(output), "--output", str(output), "--page")
    assert main(options) == 0
    assert files_of(output) == files_of(evidence / "page")
    assert files_of(folder / "sweeps") == files_of(evidence / "sweeps")
    assert f"took up {len(read_records(evidence))} cells" in capsys.readouterr().err
    restored = files_of(folder)
    assert main([option for option in options if option != "--page"]) == 0
    assert files_of(folder) == restored  # nothing was measured again
    assert "took up 0 cells" in capsys.readouterr().err


def test_an_archive_takes_the_place_of_a_part_of_its_own_cells_and_of_nothing_else(
    evidence: Path, materials_file: Path, tmp_path: Path
) -> None:
    output, name = evidence / "page", "queries-tiny-sst2-q4.jsonl"
    whole = (evidence / "sweeps" / name).read_bytes()
    header, *rest = whole.splitlines(keepends=True)
    other = json.loads(rest[-1]) | {"key": "of longer training"}
    later = whole + json.dumps(other).encode() + b"\n"
    for number, (here, expected) in enumerate(
        [
            (b"", whole),
            (header, whole),  # a start that measured nothing
            (header + b"".join(rest[:-1]) + rest[-1][:20], whole),
            (whole + b"torn", whole + b"torn"),
            (later, later),
            (header.replace(b"sha256:", b"sha256:0"), header.replace(b"sha256:", b"sha256:0")),
        ]
    ):
        folder = tmp_path / str(number)
        (folder / "sweeps").mkdir(parents=True)
        (folder / "sweeps" / name).write_bytes(here)
        Runner(find_materials(materials_file, None), folder, quick=True).restore(output)
        assert (folder / "sweeps" / name).read_bytes() == expected, number
        assert not list((folder / "sweeps").glob("*.restored"))


def test_a_density_that_the_restored_curve_finds_flat_is_restored_too(
    materials_file: Path, tmp_path: Path
) -> None:
    materials = find_materials(materials_file, None)
    (model,), (task,) = materials.models, materials.tasks
    size = size_for(model)
    first, second = (Runner(materials, tmp_path / name) for name in ("first", "second"))
    for stage in ("table", "fractions", "flat"):
        for unit in units(stage, model, task, size, density=1e-2, fractions=FRACTIONS):
            measured_elsewhere(first, unit, loss={1e-2: 0.3}.get(unit.choices["density"], 0.9))
    assert first.flat(model) == 1e-2
    assert first.page(tmp_path / "output") == tmp_path / "output"
    second.restore(tmp_path / "output")
    assert files_of(second.folder / "sweeps") == files_of(first.folder / "sweeps")
    assert any(record["stage"] == "flat" for record in read_records(second.folder))


def measured_elsewhere(runner: Runner, unit: Unit, *, loss: float) -> None:
    """Results of a sweep, made up: an untrained loss of 1, and of trained methods one that a seed moves."""
    path = runner.folder / f"sweeps/{unit.name}.jsonl"
    sweep = sweep_of(tomllib.loads(unit.toml(runner.materials)), runner.folder)
    results = open_results(sweep, path)
    path.with_suffix(".toml").write_text(unit.toml(runner.materials))
    for cell in cells_of(sweep):
        trained = cell.method.order is not None
        of_seed = (loss if trained else 1.0) + 0.001 * cell.seed
        made_up = {
            "items": [f"item {number}" for number in range(40)],
            "groups": [f"text {number}" for number in range(40)],
            "item_losses": [of_seed] * 40,
            "correct": "01" * 20,
            "accuracy": 0.5,
            "majority": 0.5,
            "loss": of_seed,
            "validation_loss": of_seed,
            "curve": [[0, of_seed]],
            "examples": {"test": 40},
            "step_factor": 1.0 if trained else None,
        }
        plain = {"seconds": 1.0, "shots": 0.0, "cut_examples": 0, "on_edge": False}
        names = {"model": cell.model.name, "base": cell.base.value, "method": cell.method.name}
        of_cell = {"kind": "cell", "key": cell.key, "task": cell.task.value, "seed": cell.seed, **names}
        results.append({**dict.fromkeys(SUMMARY), **made_up, **plain, **of_cell})


@pytest.mark.parametrize("lost", ["a sweep", "a figure", "its sweep's file", "the procedure", "everything"])
def test_a_page_is_not_replaced_by_one_that_shows_less(
    evidence: Path, materials_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    output, folder = tmp_path / "output", tmp_path / "evidence"
    shutil.copytree(evidence / "page", output)
    shutil.copytree(evidence, folder)
    sweep = folder / "sweeps/table-tiny-sst2-pairs.jsonl"
    match lost:
        case "a sweep":
            sweep.unlink()
        case "a figure":
            (folder / "memory.jsonl").unlink()
        case "its sweep's file":
            sweep.with_suffix(".toml").unlink()
        case "the procedure":
            sweep.write_bytes(sweep.read_bytes().replace(b'"procedure":2', b'"procedure":1', 1))
        case _:
            shutil.rmtree(folder)
    before = files_of(output)
    assert main(arguments(materials_file, folder, "--page", "--output", str(output))) == 0
    assert files_of(output) == before
    told = capsys.readouterr().err
    assert f"it stays, the new page is in {folder / 'page'}" in told
    assert ("memory" if lost == "a figure" else "tiny sst2 bf16") in told
    assert (folder / "page/evidence.md").exists()


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("evidence/queries-tiny-sst2-q4.jsonl", b"", "whole lines"),
        ("evidence/queries-tiny-sst2-q4.jsonl", b'{"kind":"sweep","key":"sha256:0"', "whole lines"),
        ("evidence/queries-tiny-sst2-q4.jsonl", b"{}\n", "line 1"),
        (
            "evidence/queries-tiny-sst2-q4.jsonl",
            b'{"kind":"sweep","key":"sha256:0","procedure":2}\n',
            "another",
        ),
        ("evidence/queries-tiny-sst2-q4.jsonl", b'{"kind":"cell","key":"x","items":0}\n', "line 1"),
        ("evidence/queries-tiny-sst2-q4.jsonl", b'{"kind":"cell","key":"x"}\n', "first line"),
        ("evidence/queries-tiny-sst2-q4.jsonl", b'{"kind":"list","key":"0"}\n', "line 1"),
        ("evidence.json", b"[]", "data of a page"),
        ("evidence.json", b'{"records": [{}], "cells": []}', "data of a page"),
    ],
)
def test_damaged_archives_are_refused(
    evidence: Path,
    materials_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    damage: bytes,
    named: str,
) -> None:
    output, folder = tmp_path / "output", tmp_path / "evidence"
    shutil.copytree(evidence / "page", output)
    (output / name).write_bytes(damage)
    assert main(arguments(materials_file, folder, "--restore", str(output), "--page")) == 1
    told = capsys.readouterr().err
    assert named in told
    assert str(output / name) in told
    assert not list((folder / "sweeps").glob("queries-tiny-sst2-q4.*"))


def test_a_folder_without_results_is_not_restored(
    materials_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(materials_file, tmp_path / "evidence", "--restore", str(tmp_path / "no"))) == 1
    assert "found neither evidence nor evidence.json" in capsys.readouterr().err


def test_what_a_kill_tore_is_measured_again_and_nothing_else(
    evidence: Path, materials_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "evidence"
    shutil.copytree(evidence, folder)
    results = folder / "sweeps/queries-tiny-sst2-q4.jsonl"
    whole = results.read_bytes()
    lines = whole.splitlines(keepends=True)
    results.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    before = files_of(folder / "sweeps")
    assert main(arguments(materials_file, folder, "--stage", "queries")) == 0
    after = files_of(folder / "sweeps")
    assert {name for name in before if before[name] != after[name]} == {results.name}
    first, again = json.loads(lines[-1]), json.loads(results.read_bytes().splitlines()[-1])
    for record in (first, again):
        del record["seconds"]
    assert first == again


def test_a_sweep_that_is_refused_relabels_nothing(
    evidence: Path, materials_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full size into the folder of a quick run: what is there was of other steps, and goes on saying so."""
    folder = tmp_path / "evidence"
    shutil.copytree(evidence, folder)
    before = files_of(folder / "sweeps")
    whole = [item for item in arguments(materials_file, folder) if item != "--quick"]
    for stage in ("queries", "coverage"):
        status = main([*whole, "--stage", stage, "--minutes", "0"])
        assert status == (1 if stage == "queries" else 0)
        assert files_of(folder / "sweeps") == before
    assert "another one" in capsys.readouterr().err


def test_what_is_of_another_procedure_or_missing_is_listed_as_not_measured(
    evidence: Path, materials_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "evidence"
    shutil.copytree(evidence, folder)
    results = folder / "sweeps/queries-tiny-sst2-q4.jsonl"
    header, *rest = results.read_text().splitlines(keepends=True)
    older = {key: value for key, value in json.loads(header).items() if key != "procedure"}
    results.write_text("".join([json.dumps(older) + "\n", *rest]))
    cells = (folder / "cells-tiny.jsonl").read_text().splitlines(keepends=True)
    (folder / "cells-tiny.jsonl").write_text("".join(line for line in cells if '"transfer"' not in line))
    assert main(arguments(materials_file, folder, "--page")) == 0
    page = (folder / "page/evidence.md").read_text()
    assert "- `queries` of tiny, sst2: 2 of 4 cells." in page
    assert "- `transfer` of tiny, sst2: not measured." in page
    assert "`coverage` of tiny" not in page
    assert "Began anew: q = 1, " in page
    searches = json.loads((evidence / "page/evidence.json").read_text())["searches"]
    assert {search["stage"] for search in searches} == {"table", "fractions", "queries", "schemes"}
    assert all(search["runs"] for search in searches)


def test_a_quick_run_has_a_folder_of_its_own(
    materials_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for quick in ([], ["--quick"]):
        assert main(["--materials", str(materials_file), "--page", *quick]) == 0
    assert {path.parent.name for path in tmp_path.glob("build/*/page")} == {"evidence", "evidence-quick"}


def test_no_cell_begins_when_the_minutes_are_over(materials_file: Path, tmp_path: Path) -> None:
    assert main(arguments(materials_file, tmp_path, "--minutes", "0")) == 0
    assert read_records(tmp_path) == []
    page = (tmp_path / "page/evidence.md").read_text()
    assert "- `table` of tiny, sst2: 0 of 20 cells." in page
    assert "figure `coverage`" in page
    assert page.count("**undecided**") == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('models = []\ncorpus = "c"\n[tasks.sst2]\ntrain = "t"\n', "expected models of different names"),
        ('models = ["m"]\n[tasks.sst2]\ntrain = "t"\n', "expected models, corpus and [tasks.<name>]"),
        ('models = ["m"]\ncorpus = "c"\ntasks = 3\n', "expected models, corpus and [tasks.<name>]"),
        ("models =", "expected models, corpus and [tasks.<name>]"),
    ],
)
def test_wrong_materials_are_told(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "materials.toml"
    path.write_text(content)
    assert main(arguments(path, tmp_path)) == 1
    assert message in capsys.readouterr().err


def test_without_folders_the_environment_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PERMILLE_DATA", raising=False)
    assert main(["--folder", str(tmp_path), "--quick"]) == 1
    assert "PERMILLE_DATA" in capsys.readouterr().err


def test_the_environment_adds_models_to_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERMILLE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PERMILLE_MODELS", str(tmp_path / "models"))
    models = find_materials(None, None).models
    assert [model.name for model in models] == ["reference-6M", "stories260K-hf", "reference-7M"]
    assert (models[0] / "config.json").is_file()
    assert find_materials(None, [tmp_path / "mine"]).models == (tmp_path / "mine",)


def test_every_sweep_is_one_that_the_product_reads(materials_file: Path, tmp_path: Path) -> None:
    folder = materials_file.parent
    materials = Materials(
        models=(folder / "tiny",),
        tasks={"sst2": {"train": folder / "train.tsv"}},
        corpus=folder / "corpus.jsonl",
    )
    size = size_for(folder / "tiny")
    for stage in SWEEP_STAGES:
        for unit in units(stage, folder / "tiny", "sst2", size, density=0.01, fractions=FRACTIONS):
            path = tmp_path / "sweep.toml"
            path.write_text(unit.toml(materials))
            sweep = read_sweep(path)
            assert sweep.density == unit.choices["density"]
            assert sweep.queries * sweep.batch_size == (16 if stage == "queries" else 128)
    assert set(SWEEP_STAGES) < set(STAGES)
    with pytest.raises(InputError, match="expected a stage"):
        units("tables", folder / "tiny", "sst2", size, fractions=())


def test_claims_of_equality_get_the_seeds_that_they_need(materials_file: Path) -> None:
    """Every side that a stage has of such a claim; `zo:full` of `table` stands beside the other densities."""
    model = materials_file.parent / "tiny"
    size = size_for(model)
    seeds: dict[tuple[str, str, str], tuple[int, ...]] = {}
    for stage in DECIDING:
        for unit in units(stage, model, "sst2", size, density=0.1, fractions=()):
            for method in unit.choices["methods"]:
                seeds[stage, unit.choices["bases"][0], method] = unit.choices["seeds"]
    for claim in CLAIMS:
        if claim.relation is not Relation.BETTER:
            for side in (claim.first, claim.second):
                base = "nf4" if side.four_bit else "bf16"
                planned = [found for (_, *rest), found in seeds.items() if rest == [base, side.method]]
                assert planned, side
                assert all(len(found) >= EQUIVALENCE_SEEDS for found in planned), side


@pytest.mark.parametrize("task", ["sst2", "boolq"])
@pytest.mark.parametrize("size", [QUICK, Size(zo_steps=200, fo_steps=1), Size(zo_steps=100, fo_steps=1)])
def test_dynamic_masks_are_evaluated_as_often_as_static_ones(
    size: Size, task: str, materials_file: Path
) -> None:
    model = materials_file.parent / "tiny"
    dynamic = 0
    for stage in SWEEP_STAGES:
        for unit in units(stage, model, task, size, density=0.01, fractions=FRACTIONS):
            if set(DYNAMIC) & set(unit.choices["methods"]):
                steps, every = unit.choices["zo_steps"], unit.choices["refresh_steps"]
                segments = len(range(0, steps, every))
                assert (
                    segments * max(1, unit.choices["evaluations"] * every // steps)
                    == (unit.choices["evaluations"])
                )
                assert steps % every == 0
                dynamic += 1
    assert dynamic == 2 + len(FRACTIONS) - 1  # the two smallest densities of this model are one


def test_densities_of_equal_masks_are_measured_once(materials_file: Path) -> None:
    """The tiny model's tensors have 512 to 2,048 weights: of 0.1 % and less each has one or two masked."""
    model = materials_file.parent / "tiny"
    planned = units("fractions", model, "sst2", QUICK, fractions=(1e-5, 1e-2, 1e-4, DENSITY, 1e-1))
    static = [
        unit.choices["density"] for unit in planned if unit.name.startswith("fractions-tiny-sst2-static")
    ]
    assert static == [1e-5, 1e-2, 1e-1]
    assert masked_share(model, 1e-4) == masked_share(model, 1e-5) < masked_share(model, DENSITY)


def test_tasks_with_passages_take_half_the_steps_and_fewer_items() -> None:
    size = Size(zo_steps=200, fo_steps=101)
    half = size.halved()
    assert (half.zo_steps, half.fo_steps) == (100, 50)
    assert (size.sizes, half.sizes) == ((1000, 128, 400), (1000, 64, 300))
    assert half.equivalence_seeds == half.seeds == size.seeds
    assert min(QUICK.halved().sizes) > 0


def test_a_tensor_has_at_least_one_masked_weight(materials_file: Path) -> None:
    """14 tensors of the tiny model: 0.001% of each is nothing, one is masked."""
    total = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    assert masked_share(materials_file.parent / "tiny", 1e-5) == 14 / total
    assert masked_share(materials_file.parent / "tiny", 0.5) == 0.5


def fraction_records(losses: Mapping[float, tuple[float, ...]]) -> list[Json]:
    return [
        {
            "stage": "table" if density == DENSITY else "fractions",
            "base": "bf16",
            "model": "m",
            "task": "sst2",
            "method": "zo:sensitive-c4",
            "density": density,
            "seed": seed,
            "validation_loss": loss,
        }
        for density, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]


def test_the_curve_is_flat_from_the_smallest_density_within_an_error_of_the_best() -> None:
    losses = {1e-4: (0.9, 0.95, 0.92), 1e-3: (0.61, 0.59, 0.63), 1e-2: (0.60, 0.60, 0.61)}
    assert flat_density(fraction_records(losses), "m", "sst2") == 1e-3
    assert flat_density(fraction_records({1e-3: (0.9, 0.8), 1e-2: (0.5, 0.4)}), "m", "sst2") == 1e-2
    assert flat_density(fraction_records({1e-3: (0.9,), 1e-2: (0.5,)}), "m", "sst2") is None
    assert flat_density([], "m", "sst2") is None


def test_the_tables_cells_are_those_of_its_density() -> None:
    own = fraction_records({1e-4: (0.9, 0.8)})
    (of_table,) = fraction_records({1e-3: (0.5,)})
    others = [
        of_table | {"seed": 3},
        of_table | {"base": "nf4"},
        of_table | {"method": "zo:full"},
        of_table | {"task": "rte"},
    ]
    assert by_density([*own, of_table, *others]) == [*own, of_table]
    assert by_density([of_table]) == []
    # What an older version measured in the stage at the table's density does not count twice.
    assert by_density([*own, of_table, of_table | {"stage": "fractions"}]) == [*own, of_table]
    table = [of_table, of_table | {"seed": 1}]
    assert flat_density([*own, *table], "m", "sst2") == 1e-3


def test_the_tables_cells_are_those_of_sixteen_bits_and_nf4() -> None:
    (of_table,) = fraction_records({1e-3: (0.5,)})
    nf4 = of_table | {"base": "nf4"}
    own = [of_table | {"stage": "schemes", "base": "squeezellm"}]
    older = [nf4 | {"stage": "schemes"}]  # of a plan that had them in the stage
    others = [nf4 | {"seed": 3}, nf4 | {"method": "fo:lora-8"}, nf4 | {"task": "rte"}, nf4 | {"density": 0.1}]
    assert by_scheme([*older, *own, of_table, nf4, *others]) == [of_table, nf4, *own]
    assert by_scheme([of_table, nf4]) == []


def test_methods_that_are_compared_have_equal_searches(materials_file: Path) -> None:
    model = materials_file.parent / "tiny"
    assert set(DECIDING) | {claim.stage for claim in CLAIMS} - {None} < set(SWEEP_STAGES)
    for task, expected in (("sst2", 3), ("rte", 1)):
        for stage in SWEEP_STAGES:
            of_stage = units(stage, model, task, size_for(model), density=0.1, fractions=FRACTIONS)
            found = {unit.choices["tuning_seeds"] for unit in of_stage}
            assert found == {1 if stage == "fractions" else expected}, stage


def test_time_is_checked_before_a_cell(materials_file: Path, tmp_path: Path) -> None:
    folder = materials_file.parent
    materials = Materials(
        models=(folder / "tiny",),
        tasks={"sst2": {"train": folder / "train.tsv"}},
        corpus=folder / "corpus.jsonl",
    )
    runner = Runner(materials, tmp_path, quick=True, minutes=0)
    for stage in ("coverage", "table", "steps"):
        with pytest.raises(TimeIsUpError):
            runner.run(stage, folder / "tiny", "sst2")
    with pytest.raises(TimeIsUpError):
        runner.memory()
    planned = runner.planned("table", folder / "tiny", "sst2")
    (row,) = progress(planned, [])
    assert (row.done, row.planned) == (0, 20)
    left = [{"unit": "table-tiny-sst2-older", "seconds": 1.0}, {"unit": planned[0].name, "seconds": 2.0}]
    (row,) = progress(planned, left)
    assert (row.done, row.hours) == (1, 2.0 / 3600)
