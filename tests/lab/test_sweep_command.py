"""Tests of `permille evaluate`: messages, exit codes and signals."""

import contextlib
import fcntl
import importlib
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from permille_lab.evaluate import cells, command
from tests.sweep_files import ROOT


def main(arguments: list[str]) -> int:
    """Return the exit code of the command."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return int(command.app(arguments, standalone_mode=False) or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_the_command_prints_the_table_and_refuses_with_a_message(
    sweep_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_file.write_text(sweep_file.read_text().replace('"zero-shot", "icl:1", ', '"zero-shot"]\n#'))
    assert main([str(sweep_file)]) == 0
    printed = capsys.readouterr().out
    assert "| zero-shot |" in printed
    assert "Rows of the files that were left out: 1, such as sst2: train.tsv:" in printed
    assert (tmp_path / "sweep.results.jsonl").exists()
    assert main([str(tmp_path / "absent.toml")]) == 3
    assert "expected a sweep as TOML" in capsys.readouterr().err
    # A full disk must not lose results.
    whole = (tmp_path / "sweep.results.jsonl").read_bytes()
    assert main([str(sweep_file), "--table", "/dev/full"]) == 1
    assert "No space left on device; all results are kept" in capsys.readouterr().err
    assert (tmp_path / "sweep.results.jsonl").read_bytes() == whole
    table = tmp_path / "new" / "table.md"
    assert main([str(sweep_file), "--table", str(table)]) == 0
    assert "| zero-shot |" in table.read_text()
    # Arguments that would overwrite results, or could not be written to, are refused at once.
    results = str(tmp_path / "sweep.results.jsonl")
    for own, message in (
        (["--table", results], "in different files"),
        (["--results", str(sweep_file)], "in different files"),
        (["--results", str(tmp_path)], "results in a file"),
        (["--results", "/dev/full"], "results in a file"),
        (["--table", str(tmp_path)], "table in a file"),
        (["--results", f"{sweep_file}/below.jsonl"], "a folder for"),
    ):
        assert main([str(sweep_file), *own]) == 3
        assert message in capsys.readouterr().err
    assert (tmp_path / "sweep.results.jsonl").read_bytes() == whole


def test_a_refusal_and_a_busy_file_have_statuses_of_their_own(
    sweep_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = sweep_file.read_text()
    sweep_file.write_text("models = 3")
    assert main([str(sweep_file)]) == 3
    assert "models: " in capfd.readouterr().err
    with (tmp_path / "sweep.results.jsonl").open("ab") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        sweep_file.write_text(whole)
        assert main([str(sweep_file)]) == 5
    assert "to be the only sweep on" in capfd.readouterr().err


def test_a_signal_whose_exception_was_lost_ends_the_sweep_at_the_next_cell(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cells.Bench.run

    def losing(*given: Any) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            command._interrupt(signal.SIGTERM, None)
        return run(*given)

    monkeypatch.setattr(cells.Bench, "run", losing)
    assert main([str(sweep_file)]) == 130
    told = capsys.readouterr().err
    assert "[0/6]" in told and "[1/6]" not in told
    assert "keeps what is done" in told


@pytest.mark.slow
def test_a_signal_ends_the_process_with_a_farewell(sweep_file: Path) -> None:
    # No cell of this length ends before the signal, even on a busy machine.
    sweep_file.write_text(sweep_file.read_text().replace("zo_steps = 4", "zo_steps = 4000"))
    arguments = [sys.executable, "-m", "permille_lab.evaluate.command", str(sweep_file)]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("[1/"):
                break
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; " in told
    assert "[6/6]" not in told


def test_the_command_is_one_of_permilles() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["permille.commands"]["evaluate"].partition(":")
    assert getattr(importlib.import_module(module), name) is command.evaluate
