"""schemathesis finds nothing: a bounded run of `python -m tests.api_fuzz`."""

from pathlib import Path

import pytest

from tests.api_fuzz import ALL_PHASES, fuzz


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("examples", "phases"),
    [(1, "examples,fuzzing"), pytest.param(50, ALL_PHASES, marks=pytest.mark.slow)],
)
def test_schemathesis_finds_nothing_with_all_checks(tmp_path: Path, examples: int, phases: str) -> None:
    for one in fuzz(tmp_path, examples=examples, phases=phases, seed=1):
        assert one.returncode == 0, f"{one.name}:\n{one.output}"
        assert " passed" in one.output
