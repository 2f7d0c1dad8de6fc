"""Sources from git: the files asked for, at their commit, and no others."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import permille_lab.reference.fetch as fetch_module
from permille.errors import InputError
from permille_lab.reference.fetch import fetch
from permille_lab.reference.sources import Source


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


def test_where_nothing_can_be_brought_what_is_there_stays_and_counts(
    tmp_path: Path, source: Source, mirror: str
) -> None:
    fetch(source, tmp_path / "texts", mirror)
    with pytest.raises(subprocess.CalledProcessError):
        fetch(replace(source, exclude=()), tmp_path / "texts", "/nowhere")
    fetch(source, tmp_path / "texts", "/nowhere")
    assert texts_in(tmp_path / "texts") == {"a.md": "first"}


def test_where_one_text_cannot_be_brought_what_is_there_stays_and_counts(
    tmp_path: Path, source: Source, mirror: str
) -> None:
    fetch(source, tmp_path / "texts", mirror)
    blob = git(tmp_path / "owner/books", "rev-parse", f"{source.commit}:b.md")
    (tmp_path / "owner/books/.git/objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(subprocess.CalledProcessError):
        fetch(replace(source, exclude=()), tmp_path / "texts", mirror)
    fetch(source, tmp_path / "texts", "/nowhere")
    assert texts_in(tmp_path / "texts") == {"a.md": "first"}


def test_a_tree_that_was_left_half_replaced_is_not_taken_for_one_that_is_done(
    tmp_path: Path, source: Source, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(source, tmp_path / "texts", mirror)
    at_removal(monkeypatch, lambda: pytest.fail("the disk is full"))
    with pytest.raises(pytest.fail.Exception, match="disk"):
        fetch(replace(source, exclude=()), tmp_path / "texts", mirror)
    monkeypatch.undo()
    with pytest.raises(subprocess.CalledProcessError):
        fetch(source, tmp_path / "texts", "/nowhere")


def test_when_what_is_there_goes_the_place_is_not_asked_any_more(
    tmp_path: Path, source: Source, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(source, tmp_path / "texts", mirror)
    at_removal(monkeypatch, lambda: (tmp_path / "owner").rename(tmp_path / "away"))
    fetch(replace(source, exclude=()), tmp_path / "texts", mirror)
    assert texts_in(tmp_path / "texts") == {"a.md": "first", "b.md": "not this"}


def test_a_relative_folder_is_as_good(
    tmp_path: Path, source: Source, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fetch(source, Path("texts/books"), mirror)
    assert texts_in(tmp_path / "texts/books") == {"a.md": "first"}


def test_all_texts_are_asked_for_at_once(
    tmp_path: Path, source: Source, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promisor's checkout asks for each file that it lacks: a round trip a file."""
    run, lacking = fetch_module._git, []

    def git_watched(folder: Path, *arguments: str, **settings: str) -> str:
        if "checkout" in arguments:
            listed = git(folder, "rev-list", "--objects", "--missing=print", "FETCH_HEAD")
            lacking.append({line[1:] for line in listed.splitlines() if line.startswith("?")})
        return run(folder, *arguments, **settings)

    monkeypatch.setattr(fetch_module, "_git", git_watched)
    fetch(source, tmp_path / "texts", mirror)
    unwanted = {
        git(tmp_path / "owner/books", "rev-parse", f"{source.commit}:{name}")
        for name in ("b.md", "picture.png")
    }
    assert lacking == [unwanted, unwanted]


def test_names_that_are_no_utf8_and_submodules_beside_texts_are_no_hindrance(
    tmp_path: Path, source: Source, mirror: str
) -> None:
    origin = tmp_path / "owner/books"
    (origin / os.fsdecode(b"caf\xe9.md")).write_text("odd")
    git(origin, "add", ".")
    git(origin, "update-index", "--add", "--cacheinfo", f"160000,{source.commit},module.md")
    git(origin, "commit", "-q", "-m", "odd names")
    later = replace(source, commit=git(origin, "rev-parse", "HEAD"))
    fetch(later, tmp_path / "texts", mirror)
    found = {path.name for path in (tmp_path / "texts").iterdir() if path.is_file()}
    assert found == {"a.md", os.fsdecode(b"caf\xe9.md"), ".fetched"}


def test_patterns_of_no_file_are_named(tmp_path: Path, source: Source, mirror: str) -> None:
    with pytest.raises(InputError, match=r"\('\*\.txt',\).*owner/books"):
        fetch(replace(source, files=("*.txt",)), tmp_path / "texts", mirror)


def at_removal(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Have `then` happen when `fetch` removes what is there."""
    run = fetch_module._git

    def git_and_then(folder: Path, *arguments: str, **settings: str) -> str:
        found = run(folder, *arguments, **settings)
        if arguments[0] == "rm":
            then()
        return found

    monkeypatch.setattr(fetch_module, "_git", git_and_then)


def test_a_source_with_a_stamp_of_another_form_is_fetched_anew(
    tmp_path: Path, source: Source, mirror: str
) -> None:
    fetch(source, tmp_path / "texts", mirror)
    (tmp_path / "texts/.fetched").write_text(str(source.commit))
    (tmp_path / "texts/a.md").write_text("changed")
    fetch(source, tmp_path / "texts", mirror)
    assert texts_in(tmp_path / "texts") == {"a.md": "first"}
