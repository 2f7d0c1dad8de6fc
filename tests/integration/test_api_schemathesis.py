"""schemathesis finds nothing: a bounded run of `python -m tests.api_fuzz`."""

from pathlib import Path

import pytest

from tests.api_fuzz import fuzz


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("examples", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_schemathesis_finds_nothing_with_all_checks(tmp_path: Path, examples: int) -> None:
    for one in fuzz(tmp_path, examples=examples, seed=1):
        assert one.returncode == 0, f"{one.name}:\n{one.output}"
        assert " passed" in one.output
