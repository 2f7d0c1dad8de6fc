"""What documents say of the project: cited records and named files exist, and counts are right."""

import re
from pathlib import Path

import pytest

from tests.architecture.reach import BUILD, ROOT, TRAINING, reached

RECORDS = ROOT / "docs" / "adr"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
READERS = ("permille", "service", "workers", "edge_agent", "keeper", "lab", "tests", "examples", "docs")
CITATION = re.compile(r"\bADRs? ?(\d+)|docs/adr/(\d+)|\]\([./]*adr/(\d+)")


def _records() -> list[Path]:
    return sorted(RECORDS.glob("[0-9]*.md"))


def test_records_are_few_numbered_without_gaps_and_all_in_the_index() -> None:
    names = [path.name for path in _records()]
    assert len(names) <= 40
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    assert re.findall(r"\]\((\d{4}-[^)]*)\)", (RECORDS / "README.md").read_text()) == names


@pytest.mark.parametrize("path", _records(), ids=lambda path: str(path.name[:4]))
def test_a_record_is_short_and_has_title_status_and_date(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert lines[0].startswith(f"# {int(path.name[:4])}. ")
    status = r"Status: (accepted|superseded by \d+)\. Date: 20\d\d-\d\d-\d\d(, revised 20\d\d-\d\d-\d\d)?\."
    assert re.fullmatch(status, lines[2]), lines[2]
    assert any(line.startswith("**Decision.**") for line in lines)


def test_every_record_that_is_cited_exists() -> None:
    known = {int(path.name[:4]) for path in _records()}
    missing = [
        f"{path.relative_to(ROOT)} cites record {''.join(found.groups(''))}"
        for room in READERS
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".md", ".c", ".h", ".inc"} and path != Path(__file__)
        for found in CITATION.finditer(path.read_text(encoding="utf-8"))
        if int("".join(found.groups(""))) not in known
    ]
    assert not missing


def test_every_link_within_the_documents_leads_to_a_file() -> None:
    lost = [
        f"{page.relative_to(ROOT)} links {link}"
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not lost


@pytest.mark.parametrize("path", [ARCHITECTURE, *_records()], ids=lambda path: str(path.name[:4]))
def test_a_file_or_folder_that_a_document_names_exists(path: Path) -> None:
    rooms = "permille|service|workers|edge_agent|keeper|lab|docs|tests|deploy|examples|requirements|scripts"
    named = re.findall(rf"`((?:{rooms})/[^`*]*)`", path.read_text(encoding="utf-8"))
    assert named or path != ARCHITECTURE
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(("start", "package"), [(TRAINING, "permille_agent"), (BUILD, "")])
def test_a_way_passes_at_most_as_many_modules_as_the_page_says(start: str, package: str) -> None:
    said = re.search(rf"`{re.escape(start)}`: (\d+)", _page())
    assert said, f"expected `{start}`: and a number in {ARCHITECTURE.name}"
    assert len([name for name in reached(start) if name.startswith(package)]) <= int(said[1])


def _page() -> str:
    return ARCHITECTURE.read_text(encoding="utf-8")
