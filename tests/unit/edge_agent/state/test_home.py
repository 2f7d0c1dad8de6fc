"""Tests of the home folder: file modes, atomic records, and errors for damaged files."""

import stat
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille_agent.cli.console import ExitCode
from permille_agent.cli.main import main
from permille_agent.state.choices import Consent, DataReferences
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


def test_a_record_is_private_and_read_back(home: Home) -> None:
    references = DataReferences(paths=(Path("/a"),))
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
    assert named.is_dir()


def test_an_unknown_log_level_is_wrong_usage(tmp_path: Path) -> None:
    assert main(["--home", str(tmp_path), "--log-level", "loud", "status"]) == 2
