"""A copy of the project without an extension, installed in a folder of its own.

    python -m tests.without permille_rollouts build/without

The copy lacks the extension's folder, its entry points and its tests. These are the folder in `tests` with
its name, and each module of tests that imports it, directly or not. In processes with the environment of the
copy, an import of the extension is an error.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTENSIONS = sorted(path.parent.name for path in (ROOT / "extensions").glob("*/__init__.py"))
_COPIED = (
    *("permille", "service", "workers", "edge_agent", "personal", "lab", "extensions"),
    *("tests", "scripts"),
    *("docs", "examples", "deploy", "requirements", "pyproject.toml", "constraints.txt", "hatch_build.py"),
    *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile", "Makefile", "mkdocs.yml"),
)
_REFUSED = '''"""The extension was removed, so its import is an error, even if another copy is installed."""
import sys

class Removed:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{name}":
            raise ModuleNotFoundError(f"{{name}} was removed", name=name)

sys.meta_path.insert(0, Removed())
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Without:
    """A copy without an extension.

    Attributes:
        source: the copy of the project.
        installed: the folder into which the copy was installed.
    """

    source: Path
    installed: Path

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a process that runs what was installed."""
        return {**os.environ, "PYTHONPATH": str(self.installed), "PYTHONUNBUFFERED": "1"}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a Python program of the copy, in the folder of the copy."""
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.source,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )


def remove(name: str, folder: Path) -> Without:
    """Copy the project without the extension, and install the copy.

    Args:
        name: the package of the extension, such as `permille_rollouts`.
        folder: an empty folder for the copy, or one that does not exist.
    """
    made = Without(source=folder / "source", installed=folder / "installed")
    made.source.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for part in _COPIED:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, made.source / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, made.source / part)
    shutil.rmtree(made.source / "extensions" / name)
    project = made.source / "pyproject.toml"
    project.write_text(without_entries(project.read_text(), name))
    for path in own_tests(name, made.source):
        path.unlink()
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--no-index", "--target", str(made.installed), str(made.source)),
        ],
        check=True,
    )
    (made.installed / "sitecustomize.py").write_text(_REFUSED.format(name=name))
    return made


def without_entries(project: str, name: str) -> str:
    """Return the text of `pyproject.toml` without the lines and list elements that name the package."""
    project = re.sub(rf'^[\w-]+ = "{name}(?:[.:][^"]*)?"\n', "", project, flags=re.MULTILINE)
    return re.sub(rf'"[^"\n]*\b{name}\b[\w.*]*"(, )?', "", project)


def own_tests(name: str, root: Path) -> list[Path]:
    """Return the tests of an extension: its folder of tests, and all modules that import one or the other.

    The lab and the pages of other extensions may also import an extension. They stay, but their tests go.
    """
    tests = sorted((root / "tests").rglob("*.py"))
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in tests}
    for room in (root / "lab", root / "extensions"):
        found = room.rglob("*.py")
        modules |= {".".join(path.relative_to(room).with_suffix("").parts): path for path in found}
    imports = {module: set(_imported(path)) for module, path in modules.items()}
    own = f"tests.{name.removeprefix('permille_')}"
    gone = {module for module in modules if f"{module}.".startswith(f"{own}.")}
    gone |= {
        module for module, names in imports.items() if any(f"{one}.".startswith(f"{name}.") for one in names)
    }
    while more := {module for module, names in imports.items() if names & gone} - gone:
        gone |= more
    return [path for path in tests if path in {modules[module] for module in gone}]


def _imported(path: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main() -> int:
    """Make the copy, write its generated pages, and run its tests.

    Tests of the repository itself, such as of its import contracts, name the extensions, so they do not run.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=EXTENSIONS)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    made = remove(asked.name, asked.folder.resolve())
    environment = made.environment
    tests = ("-m", "pytest", "-n", "2", "--ignore=tests/architecture")
    for command in (("-m", "permille.native.build"), ("-m", "scripts.commands"), tests):
        ended = subprocess.run([sys.executable, *command], cwd=made.source, env=environment, check=False)
        if ended.returncode:
            return ended.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
