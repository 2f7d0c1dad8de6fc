"""schemathesis finds nothing: a bounded run of `python -m tests.api_fuzz`."""

from pathlib import Path

import pytest

from tests.api_fuzz import fuzz


@pytest.mark.timeout(1200)
def test_schemathesis_finds_nothing_with_all_checks(tmp_path: Path) -> None:
    for one in fuzz(tmp_path, examples=2, seed=1):
        assert one.returncode == 0, f"{one.name}:\n{one.output}"
        assert " passed" in one.output
