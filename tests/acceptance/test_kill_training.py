"""Kills at random moments and cuts of a journal do not change the result of a run (`make kill-agent`)."""

from pathlib import Path

import pytest

from permille_agent.state.home import open_home
from tests.acceptance.kill_agent import Command, bigram_command, end_of, kill_runs, private_command

KILLS = 10


@pytest.mark.slow
@pytest.mark.parametrize("command", [bigram_command, private_command])
def test_kills_change_no_bit(tmp_path: Path, command: Command) -> None:
    cuts = 1 if command is bigram_command else 0
    report = kill_runs(tmp_path, command, kills=KILLS, cuts=cuts, seed=KILLS)

    assert report.kills >= KILLS
    assert report.cuts == cuts
    assert report.differences == []
    end = end_of(open_home(tmp_path / "whole"))
    assert bool(end["state"])
    assert bool(end["log"]) == (command is bigram_command)
