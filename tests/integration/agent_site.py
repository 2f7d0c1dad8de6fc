"""`permille-agent` as a process, against a service in a thread; every connection that it opens is noted."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# Loaded by the interpreter before all else: notes where sockets connect to and which names are looked up.
SPY = """
import os, socket
_path = os.environ["AGENT_SPY"]
def _note(what):
    with open(_path, "a") as file:
        file.write(repr(what) + "\\n")
_connect, _connect_ex, _lookup = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo
def connect(self, address):
    _note(address)
    return _connect(self, address)
def connect_ex(self, address):
    _note(address)
    return _connect_ex(self, address)
def getaddrinfo(host, *rest, **options):
    _note((host,))
    return _lookup(host, *rest, **options)
socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo = connect, connect_ex, getaddrinfo
"""


@dataclass(frozen=True)
class Ended:
    """The exit of a command, with all that it printed."""

    code: int
    output: str
    errors: str


class AgentSite:
    """One device in a folder: home, environment and notes on its connections."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.home = folder / "home"
        self._spy = folder / "connections.txt"
        spy_folder = folder / "spy"
        spy_folder.mkdir()
        (spy_folder / "sitecustomize.py").write_text(SPY)
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (spy_folder, ROOT, ROOT / "edge_agent"))),
            "AGENT_SPY": str(self._spy),
            "OMP_NUM_THREADS": "1",
            **environment,
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "permille_agent", "--home", str(self.home), *arguments],
            env=self._environment,
            cwd=self.home.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> Ended:
        """A command, to its end."""
        process = self.start(*arguments)
        output, errors = process.communicate()
        return Ended(process.returncode, output, errors)

    def json(self, *arguments: str) -> dict[str, Any]:
        """Return the output of a command that succeeds."""
        ended = self.run(*arguments, "--json")
        assert ended.code == 0, ended.errors
        document: dict[str, Any] = json.loads(ended.output)
        return document

    def connections(self) -> set[str]:
        """Return as text the addresses that sockets connected to and the names that were looked up."""
        return set(self._spy.read_text().splitlines()) if self._spy.exists() else set()
