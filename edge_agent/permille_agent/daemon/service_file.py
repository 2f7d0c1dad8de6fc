"""Service file that starts the daemon at login: a systemd user unit or a launchd agent, without root."""

import plistlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from permille.errors import InputError, OperatorError
from permille.files import write_atomic

LABEL = "dev.permille.agent"
UNIT = "permille-agent.service"

# Several distributions forbid user namespaces. On these, a user unit fails if it has ProtectSystem= or
# PrivateTmp=, so this unit has neither. The system unit in deploy/systemd/ also protects the file system.
_SYSTEMD = """\
[Unit]
Description=permille agent: personalises a language model on this device
StartLimitIntervalSec=10min
StartLimitBurst=5

[Service]
Type=exec
ExecStart={command}
Restart=on-failure
RestartSec=30s
# 2, 3: the command or the policy is wrong; starting again would not help.
RestartPreventExitStatus=2 3
KillSignal=SIGTERM
TimeoutStopSec=60s
Nice=10
IOSchedulingClass=idle
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy=default.target
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFile:
    """A service file: its path, its text, and the commands that enable and disable it."""

    path: Path
    text: str
    enable: str
    disable: str


def agent_command(home: Path) -> list[str]:
    """Return the command that starts the daemon with the program that runs now."""
    program = shutil.which("permille-agent", path=str(Path(sys.executable).parent))
    start = [program] if program else [sys.executable, "-P", "-m", "permille_agent"]
    return [*start, "--home", str(home), "run"]


def service_file(platform: str, *, user_home: Path, agent_home: Path, command: Sequence[str]) -> ServiceFile:
    """Return the service file for a value of `sys.platform`.

    Raises:
        InputError: the platform is neither Linux nor macOS.
    """
    if platform.startswith("linux"):
        return ServiceFile(
            path=user_home / ".config/systemd/user" / UNIT,
            text=systemd_unit(command),
            enable=f"systemctl --user daemon-reload && systemctl --user enable --now {UNIT}",
            disable=f"systemctl --user disable --now {UNIT}",
        )
    if platform == "darwin":
        path = user_home / "Library/LaunchAgents" / f"{LABEL}.plist"
        return ServiceFile(
            path=path,
            text=launchd_agent(command, agent_home),
            enable=f"launchctl bootstrap gui/$(id -u) {path}",
            disable=f"launchctl bootout gui/$(id -u)/{LABEL}",
        )
    raise InputError(
        f"{platform} is not supported, only linux and darwin. Start `permille-agent run` by other means."
    )


def systemd_unit(command: Sequence[str]) -> str:
    """Return the text of the systemd user unit.

    Raises:
        InputError: an argument has control characters.
    """
    return _SYSTEMD.format(command=" ".join(map(_quote, command)))


def launchd_agent(command: Sequence[str], agent_home: Path) -> str:
    """Return the text of the launchd agent."""
    log = str(agent_home / "daemon.log")
    document = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        # A clean end does not start the daemon again. Unlike systemd, launchd cannot exclude exit codes 2
        # and 3.
        "KeepAlive": {"SuccessfulExit": False},
        "ProcessType": "Background",
        "LowPriorityIO": True,
        "Nice": 10,
        "Umask": 0o077,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps(document).decode()


def install_service(file: ServiceFile) -> None:
    """Write the service file for this user.

    Raises:
        OperatorError: the folder cannot be written.
    """
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file.path, file.text.encode())
    except OSError as exc:
        raise OperatorError(f"Cannot write {file.path}: {exc}") from exc


def _quote(argument: str) -> str:
    if any(ord(character) < 32 for character in argument):
        raise InputError(f"The path {argument!r} has control characters. Choose another --home.")
    # systemd expands % and $ in a command.
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != argument or " " in argument or "'" in argument else argument
