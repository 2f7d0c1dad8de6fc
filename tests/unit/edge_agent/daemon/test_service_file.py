"""Tests of the service files: their contents, their places, and the quoting of paths."""

import plistlib
import shlex
from configparser import RawConfigParser
from pathlib import Path

import pytest

from permille.errors import InputError, OperatorError
from permille_agent.daemon.service_file import agent_command, install_service, service_file, systemd_unit

DEPLOY = Path(__file__).parents[4] / "deploy/systemd"
COMMAND = ["/opt/agent/bin/permille-agent", "--home", "/home/me/.local/share/permille-agent", "run"]


def parse(text: str) -> RawConfigParser:
    parser = RawConfigParser(strict=True)
    # systemd's option names are case-sensitive. By default, the parser would make them lowercase.
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def test_the_unit_is_hardened_starts_the_daemon_and_stops_it_cleanly() -> None:
    unit = parse(systemd_unit(COMMAND))
    assert shlex.split(unit["Service"]["ExecStart"]) == COMMAND
    assert unit["Service"]["KillSignal"] == "SIGTERM"
    assert unit["Install"]["WantedBy"] == "default.target"

    service = unit["Service"]
    with pytest.raises(InputError, match="control characters"):
        systemd_unit(["/bin/agent", "--home", "/x\nExecStartPre=/bin/evil", "run"])
    for key in ("NoNewPrivileges", "RestrictNamespaces", "RestrictSUIDSGID", "LockPersonality"):
        assert service[key] == "yes"
    assert service["UMask"] == "0077"
    assert service["SystemCallFilter"] == "@system-service"


@pytest.mark.parametrize(
    ("folder", "written"),
    [
        ("/home/me/my data", '"/home/me/my data"'),
        ("/home/100%/x", '"/home/100%%/x"'),
        ('/home/"q"', '"/home/\\"q\\""'),
        ("/home/$USER", '"/home/$$USER"'),
        ("/home/back\\slash", '"/home/back\\\\slash"'),
        ("/plain", "/plain"),
    ],
)
def test_paths_are_quoted_for_systemd(folder: str, written: str) -> None:
    unit = systemd_unit(["/bin/agent", "--home", folder, "run"])
    assert f"ExecStart=/bin/agent --home {written} run\n" in unit


def test_linux_and_macos_have_their_places(tmp_path: Path) -> None:
    linux = service_file("linux", user_home=tmp_path, agent_home=tmp_path / "agent", command=COMMAND)
    assert linux.path == tmp_path / ".config/systemd/user/permille-agent.service"
    assert "systemctl --user" in linux.enable
    mac = service_file("darwin", user_home=tmp_path, agent_home=tmp_path / "agent", command=COMMAND)
    assert mac.path == tmp_path / "Library/LaunchAgents/dev.permille.agent.plist"
    plist = plistlib.loads(mac.text.encode())
    assert plist["ProgramArguments"] == COMMAND
    assert plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["Umask"] == 0o077

    with pytest.raises(InputError, match="win32"):
        service_file("win32", user_home=tmp_path, agent_home=tmp_path, command=COMMAND)


def test_the_file_is_written_for_this_user_only(tmp_path: Path) -> None:
    file = service_file("linux", user_home=tmp_path, agent_home=tmp_path / "agent", command=COMMAND)
    install_service(file)
    install_service(file)
    assert file.path.read_text() == file.text
    assert [path.name for path in file.path.parent.iterdir()] == ["permille-agent.service"]


def test_a_home_that_cannot_be_written_is_for_a_person(tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("a file where a folder should be")
    with pytest.raises(OperatorError, match="Cannot write"):
        install_service(service_file("linux", user_home=tmp_path, agent_home=tmp_path, command=COMMAND))


def test_the_command_is_absolute_and_names_the_home(tmp_path: Path) -> None:
    command = agent_command(tmp_path)
    assert Path(command[0]).is_absolute()
    assert command[-3:] == ["--home", str(tmp_path), "run"]


def test_the_system_wide_unit_closes_the_file_system() -> None:
    service = parse((DEPLOY / "permille-agent.service").read_text())["Service"]
    assert service["ProtectSystem"] == "strict"
    assert service["User"] == "permille-agent"
    assert service["StateDirectory"] == "permille-agent"
    assert "PERMILLE_AGENT_HOME=/var/lib/permille-agent" in service["Environment"]
    user = parse(systemd_unit(COMMAND))["Service"]
    kept = {key: value for key, value in user.items() if key != "ExecStart"}
    assert kept.items() <= dict(service).items()
