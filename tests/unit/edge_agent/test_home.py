"""The home folder: closed to others, written atomically, clear about damage."""

import stat
from pathlib import Path

import pytest

from permille.errors import InputError, OperatorError
from permille_agent.cli.settings import read_settings
from permille_agent.state.home import Home, open_home, read_state, write_state


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_home_and_its_folders_are_closed_to_others(tmp_path: Path) -> None:
    home = open_home(tmp_path / "deep" / "home")
    assert {mode(path) for path in (home.root, home.blobs, home.runs, home.reports, home.partial)} == {0o700}


def test_an_open_home_is_closed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "home").chmod(0o755)
    assert mode(open_home(tmp_path / "home").root) == 0o700


def test_a_file_in_place_of_the_home_is_for_a_person(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("not a folder")
    with pytest.raises(OperatorError, match="expected a folder"):
        open_home(tmp_path / "home")


def test_state_is_private_and_read_back(home: Home) -> None:
    write_state(home.data, {"paths": ["/a"], "n": 1})
    assert mode(home.data) == 0o600
    assert read_state(home.data) == {"paths": ["/a"], "n": 1}
    assert read_state(home.consent) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff"])
def test_damaged_state_is_for_a_person(home: Home, damage: bytes) -> None:
    home.data.write_bytes(damage)
    with pytest.raises(OperatorError, match=r"data\.json"):
        read_state(home.data)


def test_settings_prefer_the_command_line_then_the_environment(tmp_path: Path) -> None:
    environment = {"PERMILLE_AGENT_HOME": "/from/environment"}
    assert read_settings(tmp_path, environment=environment).home == tmp_path
    assert read_settings(environment=environment).home == Path("/from/environment")
    assert read_settings(environment={}).home.name == "permille-agent"


def test_settings_refuse_an_unknown_log_level() -> None:
    with pytest.raises(InputError, match="log level"):
        read_settings(log_level="loud")
