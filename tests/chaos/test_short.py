"""A short `make chaos`: every group of faults once, some jobs of every kind."""

import re

import pytest

from tests.chaos import pressure
from tests.chaos.__main__ import main

JOBS = 44


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_lost_published_twice_or_left_over(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--jobs", str(JOBS), "--seed", "7", "--minutes", "10"])
    printed = capsys.readouterr().out
    last = printed.splitlines()[-1]
    assert last == f"chaos: jobs={JOBS} lost=0 published_twice=0 orphan_blobs=0", printed
    assert code == 0
    told = re.findall(r"faults: (\d+) injected, (\d+) spared", printed)
    assert sum(int(number) for counts in told for number in counts) == 29


@pytest.mark.slow
def test_a_locked_table_a_hung_broker_and_slow_requests_hold_up_no_other_tenant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = pressure.main(["--seconds", "10"])
    assert code == 0, capsys.readouterr().out
