"""Test that the benchmark of claims fits the current tables, which it fills by hand."""

import argparse
import re
from pathlib import Path

from permille_lab.service.queue_times import queue_line


def test_it_claims_from_the_jobs_that_it_made(tmp_path: Path) -> None:
    asked = argparse.Namespace(queued=40, ended=100, tenants=4, claims=5)
    line = queue_line("sqlite", f"sqlite:///{tmp_path / 'permille.db'}", asked)
    assert re.match(r"queue: sqlite +\d+ claims/s  slowest [\d.]+ ms", line)
    assert line.endswith("(40 queued by 4 tenants, 100 ended)")
