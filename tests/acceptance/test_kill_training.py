"""SIGKILL at random moments changes nothing of a run's end. Fifty: `make kill-agent`."""

from pathlib import Path

from tests.acceptance.kill_agent import bigram_command, kill_runs


def test_ten_kills_change_no_bit(tmp_path: Path) -> None:
    report = kill_runs(tmp_path, bigram_command, kills=10, seed=1)

    assert report.kills == 10
    assert report.differences == []
