"""Tests of the home folder: file modes, atomic records, and errors for damaged files."""

import os
import stat
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille.exits import ExitCode
from permille_agent.cli.main import main
from permille_agent.state.choices import (
    Consent,
    DataReferences,
    add_references,
    read_references,
    remove_references,
    repair_references,
)
from permille_agent.state.home import Home, open_home, read_record, write_record


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_home_and_its_folders_are_closed_to_others(tmp_path: Path) -> None:
    home = open_home(tmp_path / "deep" / "home")
    assert {mode(path) for path in (home.root, home.blobs, home.runs, home.reports, home.partial)} == {0o700}


def test_an_open_home_is_closed_and_a_file_in_its_place_is_for_a_person(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "home").chmod(0o755)
    assert mode(open_home(tmp_path / "home").root) == 0o700
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OperatorError, match="Cannot write the folder"):
        open_home(tmp_path / "file")


def test_a_folder_of_other_files_is_no_home_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir(mode=0o755)
    (tmp_path / "letters/one.txt").write_text("Dear Jo")
    (tmp_path / "letters/reports").mkdir()
    for command in (("status",), ("enroll", "https://example.org", "x"), ("forget", "--yes")):
        assert main(["--home", str(tmp_path / "letters"), *command]) == ExitCode.OPERATOR
    assert mode(tmp_path / "letters") == 0o755
    assert (tmp_path / "letters/one.txt").read_text() == "Dear Jo"
    assert len(list((tmp_path / "letters").iterdir())) == 2
    with pytest.raises(OperatorError, match=r"not an agent's home: it holds one\.txt"):
        open_home(tmp_path / "letters")


def test_a_home_may_be_unfinished_or_have_more_files(tmp_path: Path) -> None:
    for name in ("trust", "lost+found", ".hidden"):  # a killed first command, and a new disk
        (tmp_path / "home" / name).mkdir(parents=True)
    home = open_home(tmp_path / "home")
    (home.root / "of-a-later-version").touch()
    assert open_home(tmp_path / "home") == home


def test_a_restored_home_may_lack_its_empty_folders(tmp_path: Path) -> None:
    for name in ("identity.key", "agent.lock.holder"):
        (tmp_path / name).touch()
    assert open_home(tmp_path).reports.is_dir()


def test_an_unset_variable_is_not_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--home", "", "status"]) == ExitCode.USAGE
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_private_and_read_back(home: Home) -> None:
    references = DataReferences(paths=("/a",))
    write_record(home.data, references)
    assert mode(home.data) == 0o600
    assert read_record(home.data, DataReferences) == references
    assert read_record(home.consent, Consent) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff", b'{"paths": 3}'])
def test_a_damaged_record_is_for_a_person(home: Home, damage: bytes) -> None:
    home.data.write_bytes(damage)
    with pytest.raises(OperatorError, match=r"data\.json is damaged and holds no DataReferences"):
        read_record(home.data, DataReferences)


def test_the_home_is_that_of_the_command_line_then_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERMILLE_AGENT_HOME", str(tmp_path / "environment"))
    assert main(["status", "--json"]) == 0
    assert (tmp_path / "environment" / "runs").is_dir()
    (tmp_path / "named").mkdir()
    assert main(["--home", str(tmp_path / "named"), "status", "--json"]) == 0
    assert (tmp_path / "named" / "runs").is_dir()


def test_a_misspelt_home_is_refused_and_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = tmp_path / "misspelt"
    for command in (["status"], ["share-log", "on"], ["chat"]):
        assert main(["--home", str(named), *command]) == ExitCode.OPERATOR
        assert f"There is no folder {named}. Check --home" in capsys.readouterr().err
    assert not named.exists()
    assert main(["--home", str(named), "enroll", "https://localhost", "no-invitation"]) == 3
    assert not named.exists()


def test_an_unknown_log_level_is_wrong_usage(tmp_path: Path) -> None:
    assert main(["--home", str(tmp_path), "--log-level", "loud", "status"]) == 2


@pytest.mark.parametrize(
    "name", [b"caf\xe9.txt", b"\xed\xb3\xa9", "plain é 😀".encode(), b"a\nb", b"0e9\xff00"]
)
def test_a_path_of_any_bytes_comes_back_from_a_record(tmp_path: Path, name: bytes) -> None:
    home = open_home(tmp_path / "home")
    path = tmp_path / os.fsdecode(name)
    path.touch()
    assert add_references(home, [path]) == read_references(home) == (path,)
    assert remove_references(home, [path]) == read_references(home) == ()


def test_a_record_with_half_a_character_can_be_read_again(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", DataReferences(paths=("/bad\udce9.txt",)))
    assert read_record(tmp_path / "a.json", DataReferences) == DataReferences(paths=("/bad?.txt",))


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ('{"paths": ["/a", "/bad\\udce9.txt"], "sha256": "0"}', ("/a", "/bad\udce9.txt")),
        ('{"paths": ["/a", 3, "b", "/\\ud800", "/\\u0000e9"]}', ("/a", "/\udce9")),
        ('{"paths": 3}', ()),
        ("[", ()),
        ("[1]", ()),
        ("[" * 100_000, ()),
    ],
)
def test_repair_keeps_the_paths_that_can_be_read(tmp_path: Path, content: str, kept: tuple[str, ...]) -> None:
    home = open_home(tmp_path)
    home.data.write_text(content)
    with pytest.raises(OperatorError, match="permille-agent data repair"):
        read_references(home)
    assert repair_references(home) == read_references(home) == tuple(map(Path, kept))


def test_repair_leaves_a_list_that_is_well(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    add_references(home, [tmp_path])
    before = home.data.stat().st_mtime_ns
    assert repair_references(home) == (tmp_path,)
    assert home.data.stat().st_mtime_ns == before
