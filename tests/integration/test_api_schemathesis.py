"""schemathesis finds no errors in a short run of `python -m tests.api_fuzz`."""

from pathlib import Path

import pytest

from tests.api_fuzz import ALL_PHASES, empty_database, fuzz


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("database", "examples", "phases"),
    [
        ("sqlite", 1, "examples,fuzzing"),
        pytest.param("sqlite", 50, ALL_PHASES, marks=pytest.mark.slow),
        pytest.param("postgresql", 5, ALL_PHASES, marks=pytest.mark.slow),
    ],
)
def test_schemathesis_finds_nothing_with_all_checks(
    tmp_path: Path, database: str, examples: int, phases: str
) -> None:
    with empty_database(database, tmp_path) as url:
        passes = fuzz(tmp_path, url, examples=examples, phases=phases, seed=1)
    for one in passes:
        assert one.returncode == 0, f"{one.name}:\n{one.output}"
        assert " passed" in one.output
