"""Tests of images: each has the distributions that its program and its kinds of job import."""

import ast
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from permille_workers.tasks import TASKS
from scripts.lock import EXTRAS

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("permille", "permille_service", "permille_workers", "permille_agent", "permille_lab")
FOLDERS = (".", "service", "workers", "edge_agent", "lab", "extensions")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Selected by a URL in the settings, not by an import.
DRIVERS = {"postgres": "psycopg", "celery": "redis"}


def image_extras(program: str) -> tuple[str, ...]:
    """Return the extras of permille that the program's image installs, according to its lock."""
    assert f"-r requirements/{program}.txt" in (ROOT / "Dockerfile").read_text()
    return EXTRAS[program]


def distributions(extras: Iterable[str]) -> set[str]:
    """Return all distributions that these extras need, directly or indirectly."""
    found: set[str] = set()
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    for line in lines:
        needed = Requirement(line)
        if needed.name == "permille":
            found |= distributions(needed.extras)
        else:
            _add(needed, found)
    return found


def _add(needed: Requirement, found: set[str]) -> None:
    name = canonicalize_name(needed.name)
    if name in found:
        return
    found.add(name)
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # a dependency of another platform
        return
    for line in lines:
        inner = Requirement(line)
        if inner.marker is None or any(
            inner.marker.evaluate({"extra": extra}) for extra in needed.extras or ("",)
        ):
            _add(inner, found)


def imported(module: str) -> set[str]:
    """Return the distributions that a module of the product imports anywhere, directly or indirectly."""
    seen: set[str] = set()
    waiting, foreign = [module], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for target in _targets(name):
            if target.split(".")[0] in PROGRAMS:
                waiting.append(target)
            else:
                foreign.add(target.split(".")[0])
    by_module = packages_distributions()
    found = foreign - set(sys.stdlib_module_names)
    return {canonicalize_name(by_module[name][0]) for name in found if name in by_module}


@cache
def _targets(module: str) -> frozenset[str]:
    file = _file(module)
    if file is None:  # the name is an attribute of a module
        return frozenset()
    targets = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue  # never executed
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            targets |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(targets)


def _file(module: str) -> Path | None:
    for folder in FOLDERS:
        place = ROOT.joinpath(folder, *module.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


@pytest.mark.parametrize("kind", TASKS)
def test_the_image_can_run_every_kind_of_job(kind: str) -> None:
    assert imported(f"permille_workers.tasks.{kind}") - distributions(image_extras("worker")) == set()


@pytest.mark.parametrize(
    ("image", "program"),
    [
        ("api", "permille_service.cli.main"),
        ("api", "permille_service.__main__"),
        ("worker", "permille_workers.__main__"),
    ],
)
def test_an_image_can_start_its_programs(image: str, program: str) -> None:
    # The API uses other functions of these modules. Only jobs fetch models from the hub. The sandbox imports
    # a library when it is asked for it, and the API asks it for heads of files and templates alone.
    sandbox = {"tokenizers", "webencodings", "pypdf", "striprtf"}
    elsewhere = {"huggingface-hub", *sandbox} if image == "api" else set()
    assert imported(program) - distributions(image_extras(image)) <= elsewhere


@pytest.mark.parametrize("image", ["api", "worker"])
@pytest.mark.parametrize(("extra", "driver"), DRIVERS.items())
def test_an_image_reaches_database_and_broker(image: str, extra: str, driver: str) -> None:
    assert extra in image_extras(image)
    assert driver in distributions([extra])


def test_only_calibrated_quantizations_need_auto_round() -> None:
    """This proves that the search finds imports within functions."""
    found = {kind for kind in TASKS if "auto-round" in imported(f"permille_workers.tasks.{kind}")}
    assert found == {"quantization"}
