"""SIGKILL at random moments changes nothing of a run's end. Fifty: `make kill-agent`."""

from pathlib import Path

import pytest

from tests.acceptance.kill_agent import bigram_command, kill_runs


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_change_no_bit(tmp_path: Path, kills: int) -> None:
    report = kill_runs(tmp_path, bigram_command, kills=kills, seed=kills)

    assert report.kills == kills
    assert report.differences == []
