"""The hook that `make hooks` installs accepts only subjects of the form `area: verb ...`."""

import subprocess
from pathlib import Path

import pytest

HOOK = Path(__file__).resolve().parents[2] / "scripts" / "hooks" / "commit-msg"


def check(message: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "message"
    path.write_text(message, encoding="utf-8")
    return subprocess.run([str(HOOK), str(path)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "message",
    [
        "service: refuse an empty body",
        "zo: remove scale exponents\n\nNothing sets them.\n# a comment of git",
        "# a comment of git\ndocs: say who signs",
        f"docs: {'x' * 66}",
        f"docs: x{'é' * 65}",
        "Merge branch 'w/docs'",
        'Revert "docs: say who signs"',
    ],
)
def test_a_good_subject_passes(message: str, tmp_path: Path) -> None:
    assert check(message, tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", "1 to 72 characters"),
        (f"docs: {'x' * 67}", "1 to 72 characters"),
        ("Fix the tests", "an area and a verb"),
        ("docs: Say who signs", "an area and a verb"),
        ("docs:say who signs", "an area and a verb"),
        ("docs: the roles of trust", "followed by a verb"),
        ("docs: whether a job is dead", "followed by a verb"),
        ("docs: say who signs.", "full stop"),
        ("docs: say who signs\nand why", "second line"),
    ],
)
def test_a_bad_subject_is_refused_with_the_reason(message: str, reason: str, tmp_path: Path) -> None:
    done = check(message, tmp_path)
    assert done.returncode == 1
    assert reason in done.stderr and "CONTRIBUTING.md" in done.stderr
