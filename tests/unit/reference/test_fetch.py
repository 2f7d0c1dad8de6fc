"""Sources from git: the files asked for, at their commit, and no others."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from reference.fetch import fetch
from reference.sources import Source


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """The first of two commits of `owner/books` below the test's folder."""
    origin = tmp_path / "owner/books"
    origin.mkdir(parents=True)
    git(origin, "init", "-q")
    for name, text in (("a.md", "first"), ("b.md", "not this"), ("picture.png", "nor this")):
        (origin / name).write_text(text)
    git(origin, "add", ".")
    git(origin, "commit", "-q", "-m", "free")
    commit = git(origin, "rev-parse", "HEAD")
    (origin / "a.md").write_text("second")
    git(origin, "commit", "-q", "-a", "-m", "no longer free")
    return Source(
        name="books",
        group="fiction",
        files=("*.md",),
        exclude=("b.md",),
        format="markdown",
        licence="CC0",
        origin="https://host.example/owner/books",
        commit=commit,
    )


@pytest.fixture
def mirror(tmp_path: Path) -> str:
    return str(tmp_path) + "/{owner}/{repository}"


def texts_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_source_is_brought_at_its_commit_without_what_is_excluded(
    tmp_path: Path, source: Source, mirror: str
) -> None:
    fetch(source, tmp_path / "texts", mirror)
    assert texts_in(tmp_path / "texts") == {"a.md": "first"}
    (tmp_path / "texts/a.md").write_text("kept")
    fetch(source, tmp_path / "texts", "/nowhere")  # already there: nothing is asked of any place
    assert texts_in(tmp_path / "texts") == {"a.md": "kept"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"exclude": ()}, {"a.md": "first", "b.md": "not this"}),
        ({"files": ("*.png",), "exclude": ()}, {"picture.png": "nor this"}),
        ({"files": ("*.md", "*.png"), "exclude": ("a.md",)}, {"b.md": "not this", "picture.png": "nor this"}),
    ],
)
def test_a_source_with_another_list_of_files_is_fetched_anew(
    tmp_path: Path, source: Source, mirror: str, changes: dict[str, tuple[str, ...]], expected: dict[str, str]
) -> None:
    fetch(source, tmp_path / "texts", mirror)
    fetch(replace(source, **changes), tmp_path / "texts", mirror)  # type: ignore[arg-type]
    assert texts_in(tmp_path / "texts") == expected


def test_a_source_at_another_commit_is_fetched_anew(tmp_path: Path, source: Source, mirror: str) -> None:
    fetch(source, tmp_path / "texts", mirror)
    (tmp_path / "texts/mine.txt").write_text("not git's")
    later = git(tmp_path / "owner/books", "rev-parse", "HEAD")
    fetch(replace(source, commit=later), tmp_path / "texts", mirror)
    assert texts_in(tmp_path / "texts") == {"a.md": "second", "mine.txt": "not git's"}


def test_a_fetch_that_failed_is_not_taken_for_one_that_is_done(
    tmp_path: Path, source: Source, mirror: str
) -> None:
    fetch(source, tmp_path / "texts", mirror)
    changed = replace(source, exclude=())
    with pytest.raises(subprocess.CalledProcessError):
        fetch(changed, tmp_path / "texts", "/nowhere")
    with pytest.raises(subprocess.CalledProcessError):
        fetch(source, tmp_path / "texts", "/nowhere")
    fetch(changed, tmp_path / "texts", mirror)
    assert sorted(texts_in(tmp_path / "texts")) == ["a.md", "b.md"]
