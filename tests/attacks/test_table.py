"""`make attack` counts the tests that ran. Skipped or broken attacks are not reported as held."""

import pytest

from tests.attacks.run import PAGE, ROWS, Table, completed


def report(row: int, outcome: str, when: str = "call") -> pytest.TestReport:
    """Return the report of one phase of a test with the marker `attack(row, "forge")`."""
    made = pytest.TestReport(f"t.py::{outcome}", ("t.py", 1, "t"), {}, "passed", None, "call")
    made.outcome, made.when, made.user_properties = outcome, when, [("attack", f"{row} forge")]  # type: ignore[assignment]
    return made


def lines(*reports: pytest.TestReport) -> list[str]:
    table = Table()
    for each in reports:
        table.pytest_runtest_logreport(each)
    return table.lines()


def test_a_row_holds_when_its_tests_ran_and_passed() -> None:
    assert lines(report(1, "passed"))[0] == "  1  held     tried=1    forge"


def test_a_setup_that_passed_is_no_attack() -> None:
    assert lines(report(1, "passed", "setup"))[0].startswith("  1  NO TEST")


@pytest.mark.parametrize("when", ["setup", "call", "teardown"])
def test_a_failure_in_any_phase_broke_the_row(when: str) -> None:
    shown = lines(report(1, "passed"), report(1, "failed", when))
    assert shown[:2] == ["  1  BROKE    tried=2    forge", "       broke: t.py::failed"]


def test_a_skip_is_shown_and_does_not_count() -> None:
    assert lines(report(1, "skipped", "setup"))[:2] == [
        "  1  NO TEST  tried=0    forge",
        "       skipped: t.py::skipped",
    ]


def test_every_row_of_the_table_is_shown() -> None:
    assert len(lines()) == len(ROWS)


def test_the_page_names_the_tests_of_every_row() -> None:
    """`python -m tests.attacks.run --page` writes them."""
    page = PAGE.read_text()
    assert completed(page) == page
    assert [int(line.split("|")[1]) for line in page.splitlines() if line[:3].strip("| ").isdigit()] == [
        *ROWS
    ]
    assert "|  |" not in page.split("## The attacks")[1].replace("| | attack", "")
