"""Tests of `Personalizer` in difficult cases: two at once, foreign folders, and changed packages."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from permille.errors import InputError
from permille.package.reader import Package
from permille_agent.embed import install_package
from permille_agent.personalizer import Personalizer
from permille_agent.state.lock import LockedError, hold_lock
from tests.packages import CHATML, sentences, tiny_package


@pytest.fixture
def notes() -> list[str]:
    return list(sentences(320, seed=3))


def test_a_second_fit_leaves_the_text_of_the_first_alone(
    package: Package, tmp_path: Path, notes: list[str]
) -> None:
    personal = Personalizer(package, tmp_path / "home", threads=1)
    personal.fit(notes, steps=1)
    written = (personal.folder / "fit.jsonl").read_bytes()
    with ThreadPoolExecutor(1) as other, hold_lock(personal._home, "fit"), pytest.raises(LockedError):
        other.submit(personal.fit, ["Another text."], steps=1).result()
    assert (personal.folder / "fit.jsonl").read_bytes() == written


def test_a_folder_with_another_package_is_refused(package: Package, tmp_path: Path) -> None:
    personal = Personalizer(package, tmp_path / "home", threads=1)
    other = tiny_package(tmp_path / "other", chat_template=CHATML)
    with pytest.raises(InputError, match=f"has another package, {package.digest}"):
        Personalizer(other, personal.folder, threads=1)
    Personalizer(package, personal.folder, threads=1)
    install_package(personal._home, other)  # another program can do this meanwhile
    with pytest.raises(InputError, match=f"has another package, {other.digest}"):
        personal.fit(list(sentences(320, seed=3)), steps=1)


def test_something_else_than_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not PosixPath"):
        Personalizer(tmp_path, tmp_path / "home")  # type: ignore[arg-type]
    assert not (tmp_path / "home").exists()


def test_load_leaves_a_folder_of_something_else_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir(mode=0o755)
    with pytest.raises(InputError, match="has no package"):
        Personalizer.load(folder)
    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    with pytest.raises(InputError, match="has no package"):
        Personalizer.load(Path(__file__))


def test_a_copy_is_private_from_its_first_byte_and_whole(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    personal = Personalizer(package, tmp_path / "home")
    modes = []

    def break_off(source: Path, target: Path, **_: object) -> None:
        modes.append(stat.S_IMODE(target.parent.stat().st_mode))
        target.mkdir()
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", break_off)
        with pytest.raises(OSError, match="full"):
            personal.save(tmp_path / "saved")
    assert modes == [0o700]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert stat.S_IMODE(personal.save(tmp_path / "saved").stat().st_mode) == 0o700


def test_a_copy_does_not_go_into_itself(package: Package, tmp_path: Path) -> None:
    personal = Personalizer(package, tmp_path / "home")
    with pytest.raises(InputError, match="lies inside"):
        personal.save(personal.folder / "saved")


def test_evaluate_leaves_no_text_behind(package: Package, tmp_path: Path, notes: list[str]) -> None:
    personal = Personalizer(package, tmp_path / "home", threads=1)
    personal.fit(notes, steps=3)
    before = sorted(personal.folder.iterdir())
    personal.evaluate(notes[:6])
    assert sorted(personal.folder.iterdir()) == before
