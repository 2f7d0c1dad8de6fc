"""The locked requirements are current and complete, have hashes, and suffice for their program."""

import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from permille_lab.measuring.random_packages import Shape, random_package
from scripts.lock import BUILD, CUDA, EXTRAS, asked_by, digest_of_inputs
from tests.running_service import environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [BUILD, *EXTRAS]
HUB = "huggingface-hub"

# This code runs in a process that can import only the distributions of the lock.
GATE = """
import importlib, importlib.util, pkgutil, sys
from pathlib import Path
others, root, *arguments = set(sys.argv[1].split()), *sys.argv[2:]

class Gate:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in others:
            raise ModuleNotFoundError(f"not in the locked file: {name}", name=name)

for room in ("edge_agent", "personal", "service", "workers", "extensions", "."):
    sys.path.insert(0, str(Path(root, room)))
sys.meta_path.insert(0, Gate())

# A library may look whether an optional one is installed: to it, the others are not.
installed = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in others else installed(name, package)

def import_all(package):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""
AGENT = """
import_all("permille_agent")
import_all("permille_rollouts.agent")
import typer.rich_utils, rich.markdown
from tokenizers import Tokenizer, models
tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
assert Tokenizer.from_str(tokenizer.to_str()).encode("b").ids == [1]
from permille.engines.factory import open_engine
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
blobs, digest = arguments
engine = open_engine(Package.open(BlobFolder(Path(blobs)), digest))
assert engine.info()["name"] == "light"
"""
API = """
import_all("permille_service")
import_all("permille_rollouts.service")
import_all("permille_rollouts.console")
import_all("permille_console")
from permille_service.__main__ import main
assert "torch" not in sys.modules
sys.exit(main())
"""
WORKER = """
import_all("permille_workers")
import_all("permille_rollouts.workers")
import torch, transformers, datasets, bitsandbytes, psycopg
"""


@dataclass(frozen=True, slots=True)
class Locked:
    """One requirement of a lock, and the number of its hashes."""

    requirement: Requirement
    hashes: int

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        return str(self.requirement.specifier).removeprefix("==")

    @property
    def applies(self) -> bool:
        marker = self.requirement.marker
        return marker is None or marker.evaluate()


def locked(name: str) -> list[Locked]:
    """Return the requirements of a lock."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    blocks = re.findall(r"^([a-z].*?)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    assert sum(len(block) + len(hashes) + 1 for block, hashes in blocks) + text.index("\n") + 1 == len(text)
    return [Locked(Requirement(block), hashes.count("--hash")) for block, hashes in blocks]


def closure(program: str) -> dict[str, list[Requirement]]:
    """Return all distributions that the program needs, directly or not, each with the requirements on it."""
    found: dict[str, list[Requirement]] = {}
    todo = [Requirement(line) for line in asked_by(program)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if (name == HUB and program == "agent") or CUDA.match(f"{name}=="):
            continue
        found.setdefault(name, []).append(wanted)
        if (name, frozenset(wanted.extras)) not in seen:
            seen.add((name, frozenset(wanted.extras)))
            todo += _asked_by(name, wanted.extras)
    return found


def _asked_by(name: str, extras: set[str]) -> Iterator[Requirement]:
    for line in requires(name) or ():
        needed = Requirement(line)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield needed


@pytest.mark.parametrize("name", [*PROGRAMS, "cuda"])
def test_a_lock_is_of_todays_inputs_and_has_hashes_and_no_host(name: str) -> None:
    program = "worker" if name == "cuda" else name
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert f"inputs {digest_of_inputs(program)};" in text.partition("\n")[0], "run `make lock`"
    assert all(one.hashes for one in locked(name))
    assert "://" not in text and "index" not in text


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.attack(12, "a dependency of a dependency that nobody chose is installed")
def test_a_lock_is_the_whole_closure_of_its_extras(program: str) -> None:
    here = {one.name: one.version for one in locked(program) if one.applies}
    asked = closure(program)
    assert set(here) == set(asked)
    wrong = {
        name: wanted
        for name, all_wanted in asked.items()
        for wanted in all_wanted
        if not wanted.specifier.contains(here[name], prereleases=True)
    }
    assert wrong == {}


def test_locks_keep_to_the_constraints() -> None:
    lines = re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned: dict[str, str] = {canonicalize_name(name): number for name, number in lines}
    for program in PROGRAMS:
        different = [one for one in locked(program) if pinned.get(one.name, one.version) != one.version]
        assert different == []


@pytest.mark.attack(12, "a range admits a version with a known hole")
@pytest.mark.parametrize(
    ("extra", "name", "bad"),
    [
        ("service", "starlette", "0.49.0"),
        ("service", "h11", "0.15.0"),
        ("service", "filelock", "3.20.2"),
        ("service", "urllib3", "2.6.2"),
        ("agent", "h11", "0.15.0"),
        ("agent", "filelock", "3.20.2"),
        ("agent", "urllib3", "2.6.2"),
        ("agent", "jinja2", "3.1.5"),
        ("torch", "filelock", "3.20.2"),
        ("", "cryptography", "46.0.4"),
    ],
)
def test_no_range_admits_a_version_with_a_known_hole(extra: str, name: str, bad: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    ranges = [wanted.specifier for wanted in map(Requirement, lines) if wanted.name == name]
    assert ranges
    assert not any(admitted.contains(bad) for admitted in ranges)


@pytest.mark.attack(12, "a locked package, or our own wheel, is built with what nothing locks")
@pytest.mark.parametrize("page", ["docs/howto/install-from-locks.md", "Dockerfile"])
def test_pages_install_what_is_locked_by_hash_and_nothing_beside_it(page: str) -> None:
    commands = re.findall(r"pip install [^`\n]*requirements/[^`\n]*", (ROOT / page).read_text())
    assert commands
    for command in commands:
        words = command.split()
        assert {"--no-deps", "--require-hashes"} <= set(words)
        assert "--only-binary :all:" in command  # building from source would use packages that no lock lists
        named = re.findall(r"requirements/([a-z]+)\.txt", command)
        assert named
        assert set(named) <= {*PROGRAMS, "cuda", "build"}
    made = re.findall(r"pip wheel [^`\n]*", (ROOT / page).read_text())
    assert made and all("--no-build-isolation" in command for command in made)


def _gated(program: str, code: str, *arguments: str) -> list[str]:
    """Return the command of a process that can import only the program and the distributions of its lock."""
    named = {"permille", *(one.name for one in locked(program))}
    others = {
        module
        for module, owners in packages_distributions().items()
        if not named & {canonicalize_name(owner) for owner in owners}
    }
    assert {"pytest", "mypy"} <= others
    return [sys.executable, "-P", "-c", GATE + code, " ".join(others), str(ROOT), *arguments]


def test_the_agent_imports_nothing_outside_its_lock(tmp_path: Path) -> None:
    shape = Shape(hidden=64, inner=128, layers=1, heads=4, kv_heads=2, vocabulary=256)
    package = random_package(tmp_path, shape)
    names = {one.name for one in locked("agent")}
    assert not {HUB, "hf-xet", "torch", "transformers"} & names
    command = _gated("agent", AGENT, str(package.blobs.root), package.digest)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_a_worker_imports_nothing_outside_its_lock() -> None:
    done = subprocess.run(_gated("worker", WORKER), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.attack(12, "the API's machine carries torch")
def test_the_api_starts_and_answers_with_nothing_outside_its_lock(tmp_path: Path) -> None:
    assert not {"torch", "transformers", "triton"} & {one.name for one in locked("api")}
    settings = {"PERMILLE_DATA_DIR": str(tmp_path), "PERMILLE_PORT": "0"}
    with subprocess.Popen(
        _gated("api", API), env=environment(**settings), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            url = _wait_for(process, tmp_path / "service.url")
            assert httpx.get(f"{url}/v1/health", timeout=60.0, trust_env=False).json()["status"] == "ok"
        finally:
            process.terminate()


def _wait_for(process: "subprocess.Popen[str]", path: Path) -> str:
    while not path.exists():
        assert process.poll() is None, process.stderr and process.stderr.read()[-2000:]
        time.sleep(0.1)
    return path.read_text().strip()
