"""Run every attack of docs/explanation/security.md: `make attack`.

A test with the marker `attack(row, what)` tries one attack. `row` is its row in the table of that page. This
command runs all of them, including slow ones, prints a line for each row, and ends with

    attack: tried=N broke=M

N is the number of tests that ran, and M the number of those that failed. The exit code is 1 if a test failed
or was skipped, or if a row of the table has no test.
"""

import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROWS = range(1, 32)
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "security.md"
TESTS = Path(__file__).parents[1]
_PROPERTY = "attack"
_MARK = re.compile(r"mark\.attack\(\s*(\d+),")
_ROW = re.compile(r"^(\| (\d+) \|.*\|)[^|]*\|$", re.MULTILINE)


@dataclass(slots=True)
class Row:
    """The results of the tests of one row."""

    attacks: set[str] = field(default_factory=set)
    held: int = 0
    broke: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the row and the words of each attack to its reports.

    pytest-xdist sends these properties from its workers to this process.
    """
    for item in items:
        mark = item.get_closest_marker("attack")
        if mark is not None:
            row, what = mark.args
            item.user_properties.append((_PROPERTY, f"{int(row)} {what}"))


class Table:
    """A collector of the tests' results by row."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = defaultdict(Row)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of one test. A test holds if its call passed and no other phase failed."""
        noted = dict(report.user_properties).get(_PROPERTY)
        if not isinstance(noted, str):
            return
        number, what = noted.split(" ", 1)
        row = self.rows[int(number)]
        row.attacks.add(what)
        if report.skipped:
            row.skipped.append(report.nodeid)
        elif report.failed:
            row.broke.append(report.nodeid)
        elif report.when == "call":
            row.held += 1

    def lines(self) -> list[str]:
        """Return one line for each row, and below it the tests that failed or were skipped."""
        lines = []
        for number in sorted({*ROWS, *self.rows}):
            row = self.rows[number]
            tried = row.held + len(set(row.broke))
            verdict = "BROKE" if row.broke else "held" if row.held else "NO TEST"
            lines.append(f"{number:>3}  {verdict:<8} tried={tried:<4} {'; '.join(sorted(row.attacks))}")
            lines += [f"       broke: {name}" for name in sorted(set(row.broke))]
            lines += [f"       skipped: {name}" for name in sorted(set(row.skipped))]
        return lines


def completed(page: str) -> str:
    """Return the page with the files of each row's tests in the last column."""
    files: dict[int, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for number in _MARK.findall(path.read_text()):
            files[int(number)].add(path.name)
    return _ROW.sub(lambda row: f"{row[1]} {', '.join(f'`{n}`' for n in sorted(files[int(row[2])]))} |", page)


def main() -> int:
    """Run the attacks, print the table and return the exit code.

    `--page` writes the last column of the page's table instead.
    """
    if sys.argv[1:] == ["--page"]:
        PAGE.write_text(completed(PAGE.read_text()))
        return 0
    table = Table()
    options = ["-q", "-m", "attack", "-n", "2", "--dist", "worksteal", "-p", "tests.attacks.run", "tests"]
    code = pytest.main(options, plugins=[table])
    print("\n".join(table.lines()))
    rows = table.rows.values()
    broke = sum(len(set(row.broke)) for row in rows)
    tried = broke + sum(row.held for row in rows)
    complete = all(table.rows[number].held for number in ROWS) and not any(row.skipped for row in rows)
    print(f"attack: tried={tried} broke={broke}")
    return 0 if complete and not broke and not code else 1


if __name__ == "__main__":
    sys.exit(main())
