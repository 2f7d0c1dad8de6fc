"""Virtual environments that contain only what a wheel's metadata asks for. They need no network.

A wheel is built from the working tree and installed by pip, with its scripts. Its dependencies for the given
extras are linked from the environment that runs the tests, and nothing else can be imported. So a dependency
that an extra forgot is missing here, too. The tests do not show that pip can resolve and download them.
"""

import subprocess
import sys
import venv
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path, PurePosixPath
from zipfile import Path as ZipPath
from zipfile import ZipFile

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment and the canonical names of the distributions in it."""

    folder: Path
    names: frozenset[str]

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def can_import(self, module: str) -> bool:
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
        return subprocess.run([self.bin / "python", "-I", "-c", code], check=False).returncode == 0


def build_wheel(folder: Path) -> Path:
    """Build a wheel of the project from the working tree."""
    _pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("permille-*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path, extras: Iterable[str]) -> Environment:
    """Make an environment with the wheel and all that it needs with `extras`."""
    installed = {_name_of(found): found for found in distributions()}
    asked = closure(_metadata(wheel), extras, installed)
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python3.*/site-packages")
    _link(asked, installed, site)
    _pip("--python", folder, "install", "--quiet", "--no-deps", "--no-compile", wheel)
    _pip("--python", folder, "check")
    return Environment(folder, frozenset(asked))


def closure(
    root: Distribution, extras: Iterable[str], installed: Mapping[str, Distribution]
) -> dict[str, Distribution]:
    """Return all distributions that `root` with `extras` needs, by canonical name, without `root`.

    Raises:
        LookupError: A distribution is missing in this environment, or has another version.
    """
    root_name = _name_of(root)
    known = {**installed, root_name: root}
    waiting = [(root_name, extra) for extra in ("", *extras)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in known[name].requires or ():
            requirement = Requirement(text)
            if not _holds(requirement.marker, extra):
                continue
            needed = canonicalize_name(requirement.name)
            if needed not in known or known[needed].version not in requirement.specifier:
                raise LookupError(f"expected {text} (of {name}) to be installed where the tests run")
            waiting += [(needed, more) for more in ("", *requirement.extras)]
    return {name: known[name] for name, _ in seen if name != root_name}


def _link(asked: Mapping[str, Distribution], installed: Mapping[str, Distribution], site: Path) -> None:
    """Link the files of `asked` into `site`. Link a whole folder if nothing else has files in it."""
    owners: dict[PurePosixPath, set[str]] = defaultdict(set)
    places: dict[PurePosixPath, Path] = {}
    for name, found in installed.items():
        for file in found.files or ():
            path = PurePosixPath(file)
            if ".." in path.parts or path.is_absolute():
                continue  # skip scripts and manual pages, which no test uses
            places[path] = Path(str(found.locate_file(file)))
            for part in (path, *path.parents):
                owners[part].add(name)
    for path in sorted(places):
        if not owners[path] & asked.keys():
            continue
        whole = next(
            part
            for part in (*reversed(path.parents), path)
            if (part.name and owners[part] <= asked.keys()) or part == path
        )
        depth = len(path.parts) - len(whole.parts)
        source = places[path] if depth == 0 else places[path].parents[depth - 1]
        target = site / whole
        if source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


def _holds(marker: Marker | None, extra: str) -> bool:
    return marker is None or marker.evaluate({"extra": extra})


def _metadata(wheel: Path) -> Distribution:
    (folder,) = (entry for entry in ZipPath(ZipFile(wheel)).iterdir() if entry.name.endswith(".dist-info"))
    return PathDistribution(folder)


def _name_of(found: Distribution) -> str:
    return canonicalize_name(found.metadata["Name"])


def _pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
