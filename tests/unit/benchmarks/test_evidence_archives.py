"""Results kept beside the page: another clone goes on from them, and no page shows less than before."""

import json
import shutil
from pathlib import Path

import pytest

from permille_lab.benchmarks.evidence import main
from permille_lab.benchmarks.evidence_materials import find_materials
from permille_lab.benchmarks.evidence_plan import FRACTIONS, size_for, units
from permille_lab.benchmarks.evidence_records import read_records
from permille_lab.benchmarks.evidence_runner import Runner
from tests.evidence_files import arguments, files_of, measured_elsewhere


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
        Runner(find_materials(materials_file, None, folder), folder, quick=True).restore(output)
        assert (folder / "sweeps" / name).read_bytes() == expected, number
        assert not list((folder / "sweeps").glob("*.restored"))


def test_a_search_that_was_begun_is_kept_beside_the_page_and_taken_up(
    evidence: Path, materials_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output, name = tmp_path / "evidence", tmp_path / "output", "queries-tiny-sst2-q4"
    shutil.copytree(evidence, folder)
    results = folder / f"sweeps/{name}.jsonl"
    whole = results.read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in whole]
    begun = b"".join(whole[: kinds.index("trial") + 1])
    results.write_bytes(begun)
    assert main(arguments(materials_file, folder, "--page", "--output", str(output))) == 0
    other = tmp_path / "other"
    restored = Runner(find_materials(materials_file, None, other), other, quick=True)
    restored.restore(output)
    assert (other / f"sweeps/{name}.jsonl").read_bytes() == begun
    before = files_of(output)
    (other / f"sweeps/{name}.jsonl").write_bytes(whole[0])
    assert main(arguments(materials_file, other, "--page", "--output", str(output))) == 0
    assert files_of(output) == before
    assert f"such as {name} tiny/bf16/" in capsys.readouterr().err
    # Of a search that is finished its trials are no loss, and what is here stays where both know something.
    chosen = kinds.index("tuning")
    results.write_bytes(b"".join(line for line in whole[: chosen + 1] if b'"trial"' not in line))
    assert main(arguments(materials_file, folder, "--page", "--output", str(output))) == 0
    assert files_of(output) != before
    results.write_bytes(begun)
    Runner(find_materials(materials_file, None, folder), folder, quick=True).restore(output)
    assert results.read_bytes().splitlines()[-1] == whole[chosen].strip()
    assert results.read_bytes().startswith(begun)


def test_a_density_that_the_restored_curve_finds_flat_is_restored_too(
    materials_file: Path, tmp_path: Path
) -> None:
    materials = find_materials(materials_file, None, tmp_path)
    (model,), (task,) = materials.models, materials.tasks
    size = size_for(model)
    first, second = (Runner(materials, tmp_path / name) for name in ("first", "second"))
    for stage in ("table", "fractions", "flat"):
        for unit in units(stage, model, task, size, density=1e-2, fractions=FRACTIONS):
            measured_elsewhere(first, unit, loss={1e-2: 0.3}.get(unit.choices["density"], 0.9))
    assert first.planner.flat(model) == 1e-2
    assert first.page(tmp_path / "output") == tmp_path / "output"
    second.restore(tmp_path / "output")
    assert files_of(second.folder / "sweeps") == files_of(first.folder / "sweeps")
    assert any(record["stage"] == "flat" for record in read_records(second.folder))


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
