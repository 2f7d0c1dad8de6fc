"""Tests of a run's progress: one line in its terminal, and the same line in another process."""

import io
import json
import math
from dataclasses import replace

from rich.console import Console

from permille_agent.state.home import Home, write_record
from permille_agent.training.progress import LiveProgress, Progress, read_progress
from tests.unit.edge_agent.state.test_lock import another_process_holds

STANDING = Progress(pid=1, phase="training", step=132, total=400, loss=4.6123, held_out=4.7, first=4.912)


def _told(console: Console, home: Home) -> None:
    with LiveProgress(home, console) as progress:
        progress.phase("looking at the text")
        progress.evaluated(0, 5.0, 5.0)
        progress.step(3, 8, 4.25)
        progress.evaluated(3, 4.5, 5.0)
        progress.step(4, 8, math.nan)
        assert json.loads(home.progress.read_text())["step"] == 0  # written at most once a second
        progress.step(8, 8, 4.25)
        assert json.loads(home.progress.read_text())["step"] == 8
    assert not home.progress.exists()


def test_a_line_fits_80_columns_and_says_step_total_losses_and_time() -> None:
    line = replace(STANDING, seconds_left=134.0).line()
    assert line == "step 132 of 400, loss 4.612, held out 4.700 (first 4.912), 2 min left"
    longest = Progress(
        pid=1, step=999_999, total=999_999, loss=19.0, held_out=19.0, first=19.0, seconds_left=9e9
    )
    assert len(longest.line()) < 80
    assert Progress(pid=1, phase="x" * 100).line() == "x" * 79


def test_a_terminal_shows_one_line_and_other_outputs_now_and_then_a_plain_one(home: Home) -> None:
    terminal, file = io.StringIO(), io.StringIO()
    _told(Console(file=terminal, force_terminal=True, width=80), home)
    _told(Console(file=file, width=40), home)  # a log is not wrapped

    assert "\r\x1b[Kstep 8 of 8, loss 4.250, held out 4.500 (first 5.000), 0 s left" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1
    assert file.getvalue().splitlines() == [
        "looking at the text",
        "step 3 of 8, loss 4.250, held out 5.000 (first 5.000)",
    ]


def test_another_process_reads_it_only_while_its_writer_works(home: Home) -> None:
    assert read_progress(home) is None
    with another_process_holds(home) as process:
        write_record(home.progress, replace(STANDING, pid=process.pid))
        assert read_progress(home) == replace(STANDING, pid=process.pid)
        write_record(home.progress, STANDING)
        assert read_progress(home) is None  # a killed run leaves its file behind
    write_record(home.progress, replace(STANDING, pid=process.pid))
    assert read_progress(home) is None
