"""The evidence in its quick form: every stage; what is killed goes on; the page says what is missing."""

import json
import shutil
from pathlib import Path

import pytest

from permille_lab.benchmarks.evidence import main
from permille_lab.benchmarks.evidence_materials import find_materials
from permille_lab.benchmarks.evidence_records import progress, read_records
from permille_lab.benchmarks.evidence_runner import Runner, TimeIsUpError
from tests.evidence_files import arguments, files_of


def test_every_stage_leaves_its_data_and_a_second_call_measures_nothing(
    evidence: Path, materials_file: Path
) -> None:
    stages = {record["stage"] for record in read_records(evidence)}
    assert stages == {
        "table",
        "fractions",
        "longer",
        "queries",
        "schemes",
    }  # one seed says of no density that it is flat
    cells = [json.loads(line)["figure"] for line in (evidence / "cells-tiny.jsonl").read_text().splitlines()]
    assert cells == ["prior", "coverage", "transfer", "steps"]
    assert (evidence / "memory.jsonl").exists()
    before = files_of(evidence)
    assert main(arguments(materials_file, evidence)) == 0
    assert files_of(evidence) == before


def test_the_page_concludes_nothing_from_one_seed_and_names_what_is_missing(evidence: Path) -> None:
    page = (evidence / "page/evidence.md").read_text()
    assert page.count("**undecided**") == 9
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
    assert {cell["figure"] for cell in data["cells"]} == {"prior", "coverage", "transfer", "steps", "memory"}


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
    stages = {search["stage"] for search in searches}
    assert stages == {"table", "fractions", "longer", "queries", "schemes"}
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
    assert "- `table` of tiny, sst2: 0 of 24 cells." in page
    assert "figure `coverage`" in page
    assert page.count("**undecided**") == 9


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
    people = tmp_path / "data/users/lamp7_dev/lamp7_dev.jsonl"
    people.parent.mkdir(parents=True)
    people.write_text(json.dumps({"user": "7", "profile": ["one", "two", "one", "three", "four", "five"]}))
    found = find_materials(None, None, tmp_path / "evidence")
    assert list(found.tasks) == ["sst2", "boolq", "rte", "copa", "wsc", "text"]
    rows = [json.loads(line) for line in found.tasks["text"]["train"].read_text().splitlines()]
    assert rows == [{"group": "7", "text": text} for text in ("one", "two", "three", "four")]
    people.unlink()
    assert list(find_materials(None, None, tmp_path / "evidence").tasks) == [
        "sst2",
        "boolq",
        "rte",
        "copa",
        "wsc",
    ]
    models = found.models
    assert [model.name for model in models] == ["reference-6M", "stories260K-hf", "reference-7M"]
    assert (models[0] / "config.json").is_file()
    assert find_materials(None, [tmp_path / "mine"], tmp_path / "evidence").models == (tmp_path / "mine",)


def test_time_is_checked_before_a_cell(materials_file: Path, tmp_path: Path) -> None:
    folder = materials_file.parent
    materials = find_materials(materials_file, None, tmp_path)
    runner = Runner(materials, tmp_path, quick=True, minutes=0)
    for stage in ("coverage", "table", "steps"):
        with pytest.raises(TimeIsUpError):
            runner.run(stage, folder / "tiny", "sst2")
    with pytest.raises(TimeIsUpError):
        runner.memory()
    planned = runner.planner.planned("table", folder / "tiny", "sst2")
    (row,) = progress(planned, [])
    assert (row.done, row.planned) == (0, 24)
    left = [{"unit": "table-tiny-sst2-older", "seconds": 1.0}, {"unit": planned[0].name, "seconds": 2.0}]
    (row,) = progress(planned, left)
    assert (row.done, row.hours) == (1, 2.0 / 3600)
