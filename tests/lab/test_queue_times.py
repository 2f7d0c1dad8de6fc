"""Test that the benchmark of claims and sweeps fits the current tables, which it fills by hand."""

import argparse
import re
from pathlib import Path

import pytest

from permille_lab.service.queue_times import _measure


def test_it_claims_from_the_jobs_and_sweeps_the_builds_that_it_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = argparse.Namespace(queued=40, ended=100, tenants=4, claims=5, waiting=6)
    _measure("sqlite", f"sqlite:///{tmp_path / 'permille.db'}", asked)
    claimed, swept = capsys.readouterr().out.splitlines()
    assert re.match(r"queue: sqlite +\d+ claims/s  slowest [\d.]+ ms", claimed)
    assert claimed.endswith("(40 queued by 4 tenants, 100 ended)")
    assert re.match(r"sweep: sqlite +[\d.]+ ms  processor [\d.]+ ms  0 writes", swept)
    assert swept.endswith("(6 waiting builds)")
