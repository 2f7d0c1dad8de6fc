"""Links, citations and names in the documents lead to existing targets, and generated pages are current."""

import re
from pathlib import Path

import pytest

from scripts import catalogue, commands
from tests.architecture.reach import BUILD, ROOT, TRAINING, reached

RECORDS = ROOT / "docs" / "adr"
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"
FORMAT = ROOT / "permille" / "FORMAT.md"
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]+)?\)")
READERS = (
    "permille",
    "service",
    "workers",
    "edge_agent",
    "personal",
    "lab",
    "extensions",
    "tests",
    "examples",
    "docs",
)
CITATION = re.compile(r"\bADRs? ?(\d+)|docs/adr/(\d+)|\]\([./]*adr/(\d+)")


def _records() -> list[Path]:
    return sorted(RECORDS.glob("[0-9]*.md"))


def _maps() -> list[Path]:
    return sorted(ARCHITECTURE.parent.glob("architecture*.md"))


def test_records_are_few_numbered_without_gaps_and_all_in_the_index() -> None:
    names = [path.name for path in _records()]
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    assert re.findall(r"\]\((\d{4}-[^)]*)\)", (RECORDS / "README.md").read_text()) == names


@pytest.mark.parametrize("path", _records(), ids=lambda path: str(path.name[:4]))
def test_a_record_has_title_status_date_and_a_decision(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith(f"# {int(path.name[:4])}. ")
    day = r"20\d\d-\d\d-\d\d"
    status = rf"Status: (proposed|accepted|superseded by \d+)\. Date: {day}(, revised {day})?\."
    assert re.fullmatch(status, lines[2]), lines[2]
    assert any(re.match(r"(\*\*|## )Decision", line) for line in lines)


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


def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading() -> None:
    assert len(_pages()) > 80
    lost = [
        f"{page.relative_to(ROOT)} links {link}{anchor}"
        for page in _pages()
        for link, anchor in LINK.findall(_without_code(page))
        if "://" not in link and not _found(page.parent / link if link else page, anchor)
    ]
    assert not lost


def test_a_link_to_nowhere_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `thing`, and *two*\n\n```\n# no heading\n```\n", encoding="utf-8")
    assert _found(page, "") and _found(page, "#one-thing-and-two")
    assert not _found(page, "#no-heading") and not _found(tmp_path / "other.md", "")


def test_index_and_site_list_every_page() -> None:
    pages = {
        page.relative_to(ROOT / "docs").as_posix()
        for folder in ("tutorial", "howto", "explanation", "reference")
        for page in (ROOT / "docs" / folder).glob("*.md")
    }
    listed = set(re.findall(r"\]\(([a-z]+/[^)#]+)\)", (ROOT / "docs" / "index.md").read_text()))
    assert pages - listed == set()
    on_site = re.findall(r"- ([a-z]+/\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert pages - set(on_site) == set()
    assert len(on_site) == len(set(on_site))


@pytest.mark.parametrize(("path", "text"), commands.pages().items(), ids=["operator", "agent"])
def test_pages_of_the_command_lines_are_made_from_the_commands(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run `make commands`"


@pytest.mark.parametrize("path", [*_maps(), *_records()], ids=lambda path: str(path.stem))
def test_a_file_or_folder_that_a_document_names_exists(path: Path) -> None:
    rooms = "|".join((*READERS, "deploy", "requirements", "scripts"))
    named = re.findall(rf"`((?:{rooms})/[^`*]*)`", path.read_text(encoding="utf-8"))
    assert named or path not in _maps()
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(("start", "package"), [(TRAINING, "permille_agent"), (BUILD, "")])
def test_a_way_passes_at_most_as_many_modules_as_the_page_says(start: str, package: str) -> None:
    said = re.search(rf"`{re.escape(start)}`: (\d+)", _page())
    assert said, f"expected `{start}`: and a number in {ARCHITECTURE.name}"
    assert len([name for name in reached(start) if name.startswith(package)]) <= int(said[1])


def test_the_page_of_models_is_made_from_the_catalogue() -> None:
    assert catalogue.PAGE.read_text(encoding="utf-8") == catalogue.text(), "run `make catalogue`"


def _pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md"), FORMAT]


def _without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def _found(page: Path, anchor: str) -> bool:
    if not page.exists() or not anchor:
        return page.exists()
    headings = re.findall(r"^#+ (.*)$", _without_code(page), re.MULTILINE)
    return anchor[1:] in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def _page() -> str:
    return ARCHITECTURE.read_text(encoding="utf-8")
