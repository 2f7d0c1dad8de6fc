"""The four pages of the tour, run unchanged: two environments, two shells, one service with TLS.

Blocks marked `server` or `device` run unchanged in that machine's bash. The variables that the tour documents
are set to places of the test. Blocks marked `install` are not run, because pip would need a network. The test
must know each of their lines and does its work: it installs a wheel of the working tree, and links what the
extras in the text ask for from the environment of the tests (`environments.py`).
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.acceptance.environments import ROOT, Environment, build_wheel, make_environment
from tests.ports import free_port

EXAMPLES = ROOT / "examples"
PAGES = ("tour.md", "tour-build.md", "tour-device.md", "tour-share.md")
TOUR = [ROOT / "docs" / "tutorial" / name for name in PAGES]
FENCE = re.compile(r"^```(?P<mark>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
MARKS = ("sh server", "sh device", "sh server install", "sh device install")
DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$", re.MULTILINE)
BLOCK_S = 600.0
END_S = 30.0

MAKE_VENV = re.compile(r"python3 -m venv ~/(\S+)")
ACTIVATE = re.compile(r"\. ~/(\S+)/bin/activate")
MAKE_WHEEL = re.compile(r"pip wheel --no-deps --wheel-dir ~/(\S+) \.")
INSTALL = re.compile(r'pip install "\$\(ls ~/(\S+)/permille-\*\.whl\)\[([a-z,]+)\]"')


@dataclass(frozen=True)
class Block:
    """A fenced block: its machine, whether it installs, and its text."""

    machine: str
    installs: bool
    text: str


@dataclass
class Machine:
    """A bash process with its own home folder. It lives as long as the tour."""

    name: str
    home: Path
    process: "subprocess.Popen[str]"
    environments: list[Environment] = field(default_factory=list)
    blocks: int = 0

    def run(self, text: str) -> str:
        """Run a block. Return all that it prints. The test fails if one of its commands fails."""
        self.blocks += 1
        script, printed, done = (self.home / f"block-{self.blocks}.{kind}" for kind in ("sh", "txt", "done"))
        script.write_text(text)
        assert self.process.stdin is not None
        self.process.stdin.write(f". {script} < /dev/null > {printed} 2>&1; : > {done}\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + BLOCK_S
        while not done.exists():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                what = f"ended with exit code {self.process.returncode}" if ended else "did not end"
                pytest.fail(f"on the {self.name}, this block {what}:\n{text}\n{printed.read_text()}")
            time.sleep(0.05)
        return printed.read_text()


@contextmanager
def machine(name: str, home: Path, folder: Path, **variables: str) -> Iterator[Machine]:
    """Run a shell in `folder` that ends at the first command that fails."""
    home.mkdir()
    place = {"HOME": str(home), "PATH": os.defpath, "LANG": "C.UTF-8"}
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {**place, **settings, **variables}
    bash = ["bash", "--noprofile", "--norc", "-eu", "-o", "pipefail"]
    process = subprocess.Popen(
        bash, cwd=folder, env=environment, stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield Machine(name, home, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        end_group(process)


def end_group(process: "subprocess.Popen[str]") -> None:
    """End the shell and its processes. A service that still runs stops its own processes on SIGTERM."""
    deadline = time.monotonic() + END_S
    number = signal.SIGTERM
    try:
        while True:
            os.killpg(process.pid, number)
            process.poll()
            time.sleep(0.1)
            number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
    except ProcessLookupError:
        process.wait()


def blocks_of(page: Path) -> list[Block]:
    """Return all fenced blocks in their order. Each must be marked for a machine."""
    found = []
    for match in FENCE.finditer(page.read_text()):
        assert match["mark"] in MARKS, f"expected a block marked as one of {MARKS}, got {match['mark']!r}"
        _, name, *rest = match["mark"].split()
        found.append(Block(name, bool(rest), match["text"]))
    return found


def install(on: Machine, text: str, wheel: Path) -> None:
    """Do the work of an `install` block without a package index."""
    folders: list[str] = []
    for line in text.splitlines():
        if match := MAKE_VENV.fullmatch(line):
            folders.append(match[1])
        elif match := ACTIVATE.fullmatch(line):
            assert match[1] == folders[-1]
        elif match := MAKE_WHEEL.fullmatch(line):
            (on.home / match[1]).mkdir(parents=True)
            shutil.copy(wheel, on.home / match[1])
        elif match := INSTALL.fullmatch(line):
            (found,) = (on.home / match[1]).glob("permille-*.whl")
            on.environments.append(make_environment(on.home / folders[-1], found, match[2].split(",")))
            on.run(f". ~/{folders[-1]}/bin/activate\n")
        else:
            pytest.fail(f"expected a line of an install block that this test knows, got {line!r}")


@dataclass
class Transcript:
    entries: list[tuple[Block, str]] = field(default_factory=list)

    def after(self, command: str, *, nth: int = 0) -> str:
        return [printed for block, printed in self.entries if command in block.text][nth]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tour_runs_as_it_stands(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheel")
    checkout = tmp_path / "checkout"
    shutil.copytree(EXAMPLES, checkout / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "desk").mkdir()
    port, kit = str(free_port()), tmp_path / "server" / "permille-tour" / "for-device"
    transcript = Transcript()
    with ExitStack() as stack:
        server = stack.enter_context(machine("server", tmp_path / "server", checkout, TOUR_PORT=port))
        device = stack.enter_context(
            machine("device", tmp_path / "device", tmp_path / "desk", TOUR_PORT=port, TOUR_FROM=str(kit))
        )
        for block in (block for page in TOUR for block in blocks_of(page)):
            on = server if block.machine == "server" else device
            if block.installs:
                install(on, block.text, wheel)
            else:
                transcript.entries.append((block, on.run(block.text)))
    assert_nothing_but_what_the_extras_ask_for(server.environments, device.environments)
    assert_what_the_text_says_came_true(transcript)


def assert_nothing_but_what_the_extras_ask_for(server: list[Environment], device: list[Environment]) -> None:
    (cloud,), (edge,) = server, device
    foreign = ("fastapi", "uvicorn", "sqlalchemy", "alembic", "celery", "datasets", "pytest")
    assert [name for name in foreign if edge.can_import(name)] == []
    assert [name for name in ("platformdirs", "celery", "psycopg", "pytest") if cloud.can_import(name)] == []
    assert edge.can_import("torch") and cloud.can_import("torch")


def assert_what_the_text_says_came_true(transcript: Transcript) -> None:
    after = transcript.after
    assert "adopted" in after("train kit/notes.txt")
    assert re.search(r"personal, run \w+", after("permille-agent status"))
    texts = [line for line in after("generate", nth=1).splitlines() if line.startswith("Today in the garden")]
    assert texts
    assert texts[0] not in after("generate", nth=0)
    assert "model.safetensors" in after("permille-agent export")
    assert re.search(r"^log +- *$", after("permille runs show"), re.MULTILINE)
    assert re.search(r"personal +no", after("permille-agent rollback"))
    (on_device,) = DIGEST.findall(after("field decision.state_digest"))
    assert after("field log.state_digest") == f"verified\n{on_device}\n"
    reset, again = after("permille-agent reset").split("personal ", 2)[1:]
    assert (reset.split()[0], again.split()[0]) == ("no", "yes")
    assert "the base model" in after("permille-agent forget")
    assert after("permille devices list").startswith("None\n")
    assert "unenrolled" in after("permille devices list")
    assert after("kill $UP") == ""
