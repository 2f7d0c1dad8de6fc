"""schemathesis finds no errors in a short run. `make schemathesis` makes a longer one."""

from pathlib import Path

import pytest

from tests.api_fuzz import ALL_PHASES, fuzz
from tests.unit.store.postgres import empty_database


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("database", "examples", "phases"),
    [
        ("sqlite", 1, ALL_PHASES),
        ("postgresql", 1, "examples,fuzzing"),
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
