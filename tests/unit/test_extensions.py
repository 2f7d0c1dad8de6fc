"""Tests of the loading of extensions: their order, and what stops a program."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from permille.extensions import extensions

PROGRAM = "test-program"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    extensions.cache_clear()
    yield
    extensions.cache_clear()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Install a distribution with these entry points."""
    info = folder / "wishes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wishes\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in values.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[permille.{PROGRAM}]", *lines]) + "\n")
    monkeypatch.syspath_prepend(folder)


def test_parts_are_in_the_order_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, wishes="math:tau", dreams="math:pi")
    assert [round(part, 2) for part in extensions(PROGRAM, float)] == [3.14, 6.28]


def test_a_program_without_extensions_has_no_parts() -> None:
    assert extensions(PROGRAM, float) == ()


def test_a_part_of_another_type_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, wishes="math:pi")
    with pytest.raises(TypeError, match=r"'wishes' in permille\.test-program is no int: 3\.14"):
        extensions(PROGRAM, int)


@pytest.mark.parametrize("value", ["nosuch.module:PART", "math:NOSUCH"])
def test_a_broken_extension_stops_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    install(tmp_path, monkeypatch, wishes=value)
    with pytest.raises((ImportError, AttributeError)):
        extensions(PROGRAM, float)
