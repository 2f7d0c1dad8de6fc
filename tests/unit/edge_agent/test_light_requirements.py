"""The pinned file of the light agent: it is what the extra asks for less what nothing imports."""

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from permille_lab.measuring.random_packages import Shape, random_package

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "requirements" / "light-agent.txt"

# Every module of the agent, a tokenizer and an open engine, in a process that finds no other distribution.
CODE = """
import importlib, pkgutil, sys
others, root, blobs, digest = set(sys.argv[1].split()), *sys.argv[2:]

class Gate:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in others:
            raise ModuleNotFoundError(f"not in the pinned file: {name}", name=name)

sys.path.insert(0, root)
sys.meta_path.insert(0, Gate())
import permille_agent
for found in pkgutil.walk_packages(permille_agent.__path__, "permille_agent."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
import typer.rich_utils, rich.markdown
from tokenizers import Tokenizer, models
tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
assert Tokenizer.from_str(tokenizer.to_str()).encode("b").ids == [1]
from pathlib import Path
from permille.engines.factory import open_engine
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
engine = open_engine(Package.open(BlobFolder(Path(blobs)), digest))
assert engine.info()["name"] == "light"
"""


def pins(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_file_is_what_its_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "light_requirements.py"), "--print"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert FILE.read_text() == done.stdout


def test_the_file_keeps_to_the_constraints_and_without_the_hub() -> None:
    found = pins(FILE.read_text())
    lines = re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned: dict[str, str] = {canonicalize_name(name): number for name, number in lines}
    assert {name: number for name, number in found.items() if pinned.get(name, number) != number} == {}
    assert {"numpy", "tokenizers", "httpx", "cryptography"} <= set(found)
    assert not {"huggingface-hub", "hf-xet", "torch", "transformers"} & set(found)


@pytest.mark.parametrize("page", ["README.md", "docs/guide/operate.md", "requirements/light-agent.txt"])
def test_pages_install_the_file_and_nothing_beside_it(page: str) -> None:
    commands = re.findall(r"pip install [^`\n]*light-agent\.txt[^`\n]*", (ROOT / page).read_text())
    assert commands
    for command in commands:
        words = command.split()
        listed, package = Path(words[words.index("-r") + 1]), words[-1]
        assert "--no-deps" in words
        assert listed.name == FILE.name and listed.parent.name in ("requirements", "for-device")
        assert package == ("." if listed.parent.name == "requirements" else "for-device/permille-*.whl")


def test_the_agent_imports_nothing_outside_the_file(tmp_path: Path) -> None:
    named = set(pins(FILE.read_text()))
    others = {
        module
        for module, owners in packages_distributions().items()
        if not {"permille", *named} & {canonicalize_name(owner) for owner in owners}
    }
    assert {"torch", "huggingface_hub"} <= others
    shape = Shape(hidden=64, inner=128, layers=1, heads=4, kv_heads=2, vocabulary=256)
    package = random_package(tmp_path, shape)
    done = subprocess.run(
        [sys.executable, "-c", CODE, " ".join(others), str(ROOT), str(package.blobs.root), package.digest],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
