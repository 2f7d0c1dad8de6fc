"""Sources from git: the files asked for, at their commit, and no others."""

import subprocess
from pathlib import Path

from reference.fetch import fetch
from reference.sources import Source


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_source_is_brought_at_its_commit_without_what_is_excluded(tmp_path: Path) -> None:
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
    source = Source(
        name="books",
        group="fiction",
        files=("*.md",),
        exclude=("b.md",),
        format="markdown",
        licence="CC0",
        origin="https://host.example/owner/books",
        commit=commit,
    )
    fetch(source, tmp_path / "texts", str(tmp_path) + "/{owner}/{repository}")
    assert (tmp_path / "texts/a.md").read_text() == "first"
    assert sorted(path.name for path in (tmp_path / "texts").glob("*.*")) == [".fetched", ".git", "a.md"]
    (tmp_path / "texts/a.md").write_text("kept")
    fetch(source, tmp_path / "texts", "/nowhere")  # already there: nothing is asked of any place
    assert (tmp_path / "texts/a.md").read_text() == "kept"
