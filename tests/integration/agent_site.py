"""`permille-agent` as a process, and a record of every connection that it opens."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.preloaded import Process

ROOT = Path(__file__).parents[2]

# The interpreter loads this first, also in children, which get no other variables than those that they need.
# It records the addresses of connections and the names of look-ups.
SPY = """
import socket
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
    """The exit code of a command, and all that it printed."""

    code: int
    output: str
    errors: str


class AgentSite:
    """One device in a folder: its home, its environment, and the record of its connections."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.home = folder / "home"
        self._spy = folder / "connections.txt"
        spy_folder = folder / "spy"
        spy_folder.mkdir()
        (spy_folder / "sitecustomize.py").write_text(f"_path = {str(self._spy)!r}\n{SPY}")
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                map(str, (spy_folder, ROOT, ROOT / "edge_agent", ROOT / "extensions"))
            ),
            "OMP_NUM_THREADS": "1",
            **environment,
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a command."""
        return Process(
            [sys.executable, "-m", "permille_agent", "--home", str(self.home), *arguments],
            env=self._environment,
            cwd=self.home.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> Ended:
        """Run a command to its end."""
        process = self.start(*arguments)
        output, errors = process.communicate()
        return Ended(process.returncode, output, errors)

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run a command that must succeed. Return the JSON that it prints."""
        ended = self.run(*arguments, "--json")
        assert ended.code == 0, ended.errors
        document: dict[str, Any] = json.loads(ended.output)
        return document

    def connections(self) -> set[str]:
        """Return as text the addresses that sockets connected to, and the names that were looked up."""
        return set(self._spy.read_text().splitlines()) if self._spy.exists() else set()
