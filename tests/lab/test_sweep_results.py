"""Tests of a sweep's results file: resumed after a stop, and never lost, mixed or written twice."""

import json
import math
from pathlib import Path

import pytest

from permille.errors import InputError
from permille_lab.evaluate.report import markdown
from permille_lab.evaluate.results import PROCEDURE, digests, open_results
from permille_lab.evaluate.specification import read_sweep
from permille_lab.evaluate.sweep import cells_of, run_sweep


def test_a_results_file_that_was_edited_is_refused_with_its_line(sweep_file: Path, tmp_path: Path) -> None:
    sweep_file.write_text(sweep_file.read_text().replace('"zero-shot", "icl:1", ', '"zero-shot"]\n#'))
    results = tmp_path / "results.jsonl"
    run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    header, *others, cell = results.read_text().splitlines(keepends=True)
    for name, value in (
        ("loss", None),
        ("loss", math.nan),
        ("accuracy", "50"),
        ("accuracy", None),
        ("majority", "x"),
        ("cut_examples", "x"),
        ("bits_per_byte", "x"),
        ("prior_loss", "x"),
        ("model", "another"),
    ):
        edited = json.dumps(json.loads(cell) | {name: value}) + "\n"
        results.write_text("".join([header, *others, edited]))
        with pytest.raises(InputError, match=f"expected a result in line {len(others) + 2} of "):
            run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    results.write_text("".join([header, *others, cell]))
    run_sweep(read_sweep(sweep_file), results, lambda *_: None)


class Stopped(Exception):  # noqa: N818 - an interruption
    """An interruption, as by a person."""


@pytest.mark.slow
def test_a_sweep_that_is_stopped_goes_on_and_ends_as_one_that_was_not(
    sweep_file: Path, tmp_path: Path
) -> None:
    sweep = read_sweep(sweep_file)

    def stop_at_three(done: int, total: int, _: str) -> None:
        if done == 3:
            raise Stopped

    results = tmp_path / "stopped.jsonl"
    with pytest.raises(Stopped):
        run_sweep(sweep, results, stop_at_three)
    with results.open("ab") as file:
        file.write(b'{"kind":"cell","key":"torn')
    told: list[tuple[int, int]] = []
    records = run_sweep(sweep, results, lambda done, total, _: told.append((done, total)))
    assert told[-1] == (6, 6)
    whole = run_sweep(sweep, tmp_path / "whole.jsonl", lambda *_: None)
    for record in (*records, *whole):
        del record["seconds"]
    assert records == whole
    assert [record["method"] for record in records] == [cell.method.name for cell in cells_of(sweep)]
    for record in records:
        assert len(record["correct"]) == len(record["items"]) == record["examples"]["test"]
        assert record["accuracy"] == record["correct"].count("1") / len(record["correct"])
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["key"] for line in lines if line["kind"] == "bad-row"] == [
        "sst2: train.tsv:49: expected 2 cells, got 1"
    ]
    # Methods without training have no curve.
    assert [record["curve"] is None for record in records] == [True, True, False, False, False, False]
    table = markdown(records)
    (prior,) = {record["prior_loss"] for record in records}
    assert 0 < prior < records[0]["loss"]
    assert f"(majority 50.0; prior {prior:.3f})" in table
    for record in records:  # older results have no prior loss
        del record["prior_loss"]
    assert "; prior" not in markdown(records).partition("| method |")[2]
    assert table.count("\n| zo:") == 3
    assert "| sst2? (" in table  # six test items are too few to decide whether the task counts


@pytest.mark.slow
def test_a_search_that_is_stopped_goes_on_after_its_last_trial(sweep_file: Path, tmp_path: Path) -> None:
    one = 'methods = ["zo:random"]\n#'
    text = sweep_file.read_text().replace("methods = [", one)
    sweep_file.write_text(text.replace("trials = 1", "trials = 3\ntuning_seeds = 3"))
    sweep, results = read_sweep(sweep_file), tmp_path / "stopped.jsonl"
    told: list[str] = []

    def stop_twice(_done: int, _total: int, following: str) -> None:
        told.append(following)
        if len(told) in (3, 7):  # before the second trial and before the fourth trial
            raise Stopped

    for _ in range(2):
        with pytest.raises(Stopped):
            run_sweep(sweep, results, stop_twice)
    (record,) = run_sweep(sweep, results, stop_twice)
    trials = [text for text in told if "trial of step factor" in text]
    twice = {text for text in trials if trials.count(text) > 1}
    # Only the two stopped trials are announced twice. The others do not begin again.
    assert twice == {told[2], told[6]}
    whole = tmp_path / "whole.jsonl"
    (expected,) = run_sweep(sweep, whole, lambda *_: None)
    del record["seconds"], expected["seconds"]
    assert record == expected

    def searches(path: Path) -> list[dict[str, object]]:
        lines = map(json.loads, path.read_text().splitlines())
        return [line for line in lines if line["kind"] in ("trial", "tuning")]

    assert searches(results) == searches(whole)
    assert len(searches(whole)) == len(set(trials)) + 1 > 7


@pytest.mark.slow
def test_seeds_that_are_added_leave_what_is_finished_as_it_is(sweep_file: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    three = sweep_file.read_text().replace('"icl:1", "zo:sensitive-c4", ', "").replace('"zo:lora-4", ', "")
    sweep_file.write_text(three.replace("seeds = [0]", "seeds = [0, 1, 2]"))
    run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    before = results.read_bytes()
    sweep_file.write_text(sweep_file.read_text().replace("seeds = [0, 1, 2]", "seeds = [0, 1, 2, 3]"))
    records = run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    assert results.read_bytes().startswith(before)
    assert len(before.splitlines()) < len(results.read_bytes().splitlines())
    whole = run_sweep(read_sweep(sweep_file), tmp_path / "whole.jsonl", lambda *_: None)
    for record in (*records, *whole):
        del record["seconds"]
    assert records == whole
    # Seeds can only be appended. Another order is another sweep, because its tunings would differ.
    sweep_file.write_text(sweep_file.read_text().replace("seeds = [0, 1, 2, 3]", "seeds = [1, 0, 2]"))
    with pytest.raises(InputError, match="another one"):
        run_sweep(read_sweep(sweep_file), results, lambda *_: None)


def test_a_sweep_that_ended_before_its_first_cell_does_not_block_the_mended_one(
    sweep_file: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    first = read_sweep(sweep_file)
    begun = digests(first)[0]
    open_results(first, results)
    (tmp_path / "train.tsv").write_text((tmp_path / "train.tsv").read_text().replace("film", "play"))
    mended = read_sweep(sweep_file)
    assert begun != digests(mended)[0]
    open_results(mended, results)
    (header,) = map(json.loads, results.read_text().splitlines())
    assert header["key"] == digests(mended)[0]


def test_results_of_another_sweep_are_refused(sweep_file: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    sweep_file.write_text(sweep_file.read_text().replace('"zero-shot", "icl:1", ', '"zero-shot"]\n#'))
    run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    (tmp_path / "train.tsv").write_text((tmp_path / "train.tsv").read_text().replace("film", "play"))
    with pytest.raises(InputError, match="another one"):
        run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    header, *rest = results.read_text().splitlines(keepends=True)
    for procedure in ({}, {"procedure": PROCEDURE + 1}):
        other = {key: value for key, value in json.loads(header).items() if key != "procedure"} | procedure
        results.write_text("".join([json.dumps(other, separators=(",", ":")) + "\n", *rest]))
        with pytest.raises(InputError, match=f"expected results of procedure {PROCEDURE}"):
            run_sweep(read_sweep(sweep_file), results, lambda *_: None)
    results.write_text('{"kind":"sweep"}\nnonsense\n')
    with pytest.raises(InputError, match="line 1"):
        run_sweep(read_sweep(sweep_file), results, lambda *_: None)


@pytest.mark.parametrize(
    "content", [b"keep me", b"line\nno newline", b"x" * 1000, b'{"kind":"sweep"}\nlost', b"[]\n{"]
)
def test_a_file_that_is_no_results_is_refused_and_left_as_it_is(
    content: bytes, sweep_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match="expected"):
        run_sweep(read_sweep(sweep_file), path, lambda *_: None)
    assert path.read_bytes() == content


def test_a_first_line_that_was_torn_is_written_again(sweep_file: Path, tmp_path: Path) -> None:
    sweep_file.write_text(sweep_file.read_text().replace('"zero-shot", "icl:1", ', '"zero-shot"]\n#'))
    path = tmp_path / "results.jsonl"
    run_sweep(read_sweep(sweep_file), path, lambda *_: None)
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    run_sweep(read_sweep(sweep_file), path, lambda *_: None)
    assert path.read_bytes().splitlines()[0] == whole.splitlines()[0]
