"""Import contracts detect violations, devices install no server library, and there is one version number."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import permille
from permille.version import __version__

ROOT = Path(permille.__file__).resolve().parents[1]
ROOMS = ("permille", "service", "workers", "edge_agent", "personal", "lab", "extensions")


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    places = [folder, *(folder / room for room in ROOMS if room != "permille")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "COLUMNS": "300"}
    return subprocess.run(
        [program, "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project's packages and of pyproject.toml, in which tests plant violations."""
    folder = tmp_path_factory.mktemp("house")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__", "static"))
    return folder


VIOLATIONS = [
    (
        "service/permille_service/planted.py",
        "import permille_workers",
        "programs never import each other",
    ),
    ("permille/zo/planted.py", "import permille_agent", "the library knows no program"),
    (
        "edge_agent/permille_agent/planted.py",
        "import permille.store",
        "only service and workers reach the store",
    ),
    (
        "edge_agent/permille_agent/planted.py",
        "import sqlalchemy",
        "only service and workers reach the store",
    ),
    ("service/permille_service/planted.py", "import torch", "the API process needs no torch"),
    (
        "service/permille_service/planted.py",
        "import permille.sensitivity.fisher",
        "the API process needs no torch",
    ),
    (
        "workers/permille_workers/planted.py",
        "import permille_lab.evaluate.cells",
        "no program imports the lab",
    ),
    (
        "personal/permille_personal/planted.py",
        "import permille_service",
        "personalise uses the library and the agent's public interface",
    ),
    (
        "personal/permille_personal/planted.py",
        "import permille_agent.training.run",
        "personalise uses the library and the agent's public interface",
    ),
    (
        "edge_agent/permille_agent/planted.py",
        "import permille_personal",
        "no program imports personalise",
    ),
    (
        "permille/pipeline/planted.py",
        "import permille.schemas.masks",
        "the steps from a model to a package know no requests, commands or rows",
    ),
    ("permille/zo/planted.py", "import permille_lab", "no program imports the lab"),
    (
        "lab/permille_lab/planted.py",
        "import permille_agent.training.run",
        "the lab uses public interfaces",
    ),
    ("permille/zo/planted.py", "import pydantic", "zo and package stay light"),
    (
        "extensions/permille_rounds/privacy/planted.py",
        "import permille.store.rows",
        "decisions and mathematics of extensions stay light",
    ),
    (
        "extensions/permille_rounds/privacy/planted.py",
        "import permille_rounds.contribution",
        "rounds are layered: rounds over masked sums over contributions over definitions over noise",
    ),
    (
        "edge_agent/permille_agent/link/planted.py",
        "import permille_rounds.definition",
        "no program imports an extension",
    ),
    (
        "extensions/permille_rounds/keeper/planted.py",
        "import permille_rounds.service.routes",
        "the parts of an extension know only their own program",
    ),
    (
        "permille/models/planted.py",
        "import permille.package.blobs",
        "the library is layered: logs over packages over models and schemes",
    ),
    ("permille/engines/light/planted.py", "import torch", "the light engine needs no torch"),
    (
        "extensions/permille_rounds/keeper/planted.py",
        "import permille.engines.light.engine",
        "a keeper needs rounds and noise, and nothing else of the product",
    ),
    (
        "service/permille_service/planted.py",
        "import permille_rollouts.service.routes",
        "no program imports an extension",
    ),
    (
        "extensions/permille_rollouts/workers/planted.py",
        "import permille_console.actions",
        "extensions never import each other",
    ),
    (
        "extensions/permille_console/planted.py",
        "import permille_rollouts.offer",
        "extensions never import each other",
    ),
    (
        "extensions/permille_rollouts/service/planted.py",
        "import permille_rollouts.console.pages",
        "only the console loads the pages of an extension",
    ),
    (
        "extensions/permille_rollouts/agent/planted.py",
        "import permille.store.rows",
        "the agent's part of an extension knows no server",
    ),
    (
        "extensions/permille_rollouts/service/planted.py",
        "import torch",
        "the service's part of an extension needs no torch",
    ),
    (
        "extensions/permille_rollouts/agent/planted.py",
        "import permille_rollouts.workers.webhooks",
        "the parts of an extension know only their own program",
    ),
    ("permille/native/planted.py", "import transformers", "the light engine needs no torch"),
    (
        "edge_agent/permille_agent/planted.py",
        "import torch",
        "the agent reaches torch only through an engine",
    ),
    (
        "edge_agent/permille_agent/state/planted.py",
        "import permille_agent.text.rows",
        "the agent is layered: commands over daemon over link over training over text over state",
    ),
]
"""Files, a line of each, and the contract that it breaks."""
CIRCLE = {
    "edge_agent/permille_agent/cli/planted.py": "import permille_agent.cli.planted_too",
    "edge_agent/permille_agent/cli/planted_too.py": "import permille_agent.cli.planted",
}


@pytest.fixture(scope="module")
def report(copy: Path) -> str:
    """The report on a house with all violations. Only a circle imports other planted modules."""
    planted: dict[Path, list[str]] = {}
    for file, line in (*((file, line) for file, line, _ in VIOLATIONS), *CIRCLE.items()):
        planted.setdefault(copy / file, []).append(line)
    for path, lines in planted.items():
        path.write_text("\n".join(lines) + "\n")
    result = _lint_imports(copy)
    for path in planted:
        path.unlink()
    assert result.returncode != 0, result.stdout
    return result.stdout


@pytest.mark.parametrize(("file", "line", "contract"), VIOLATIONS)
def test_a_planted_violation_breaks_its_contract(report: str, file: str, line: str, contract: str) -> None:
    assert f"{contract} BROKEN" in report
    broken = report.partition("Broken contracts")[2]
    chains = re.split(r"^-{3,}$", broken.partition(f"{contract}\n")[2], maxsplit=2, flags=re.MULTILINE)[1]
    rooms = "|".join(ROOMS[1:])
    module = re.sub(rf"^(?:{rooms})/", "", file).removesuffix(".py")
    assert f"{module.replace('/', '.')} -> {line.split()[1]} " in chains


def test_a_planted_circle_breaks_its_contract(report: str) -> None:
    assert "no circles among the agent's commands BROKEN" in report


def test_the_unchanged_house_keeps_its_contracts(copy: Path) -> None:
    result = _lint_imports(copy)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_device_installs_no_server_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    device = [*project["dependencies"], *extras["agent"], *extras["torch"]]
    names = {re.split(r"[<>=\[ ]", requirement)[0].lower() for requirement in device}
    assert names.isdisjoint({"fastapi", "celery", "redis", "sqlalchemy", "alembic", "uvicorn", "datasets"})
    assert not any(requirement.startswith("permille[") for requirement in device)


def test_a_wheel_has_every_file_of_the_extensions() -> None:
    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    found = (path for path in (ROOT / "extensions").rglob("*") if path.is_file())
    files = {
        str(path.relative_to(ROOT / "extensions")) for path in found if path.parent.name != "__pycache__"
    }
    assert {"permille_console/vendor/htmx.min.js", "permille_console/templates/base.html.jinja"} < files
    assert files <= packed


def test_messages_and_pages_advise_only_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for room in ROOMS:
        places += (ROOT / room).rglob("*.py")
    advised = {
        (path.name, extra)
        for path in places
        for names in re.findall(r"(?:permille\[|install_line\([\"'])([a-z0-9, -]+)", path.read_text())
        for extra in names.split(",")
    }
    assert advised
    assert {(name, extra) for name, extra in advised if extra.strip() not in extras} == set()


def test_there_is_one_version_number() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    written = [
        path.relative_to(ROOT)
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"^__version__\s*=", path.read_text(encoding="utf-8"), flags=re.M)
    ]
    assert written == [Path("permille/version.py")]


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("permille.zo.replay", {"torch", "pydantic", "sqlalchemy", "httpx"}),
        ("permille.package.reader", {"torch", "pydantic", "sqlalchemy", "httpx"}),
        ("permille.engines.light.engine", {"torch", "transformers", "pydantic", "sqlalchemy", "httpx"}),
        ("permille_rounds.keeper.main", {"torch", "pydantic", "sqlalchemy", "httpx"}),
        ("permille_agent.cli.main", {"torch", "transformers", "fastapi", "sqlalchemy", "celery"}),
        ("permille_service.app", {"torch", "transformers", "bitsandbytes", "datasets"}),
        ("permille_personal.command", {"torch", "transformers", "permille_agent", "numpy", "httpx"}),
    ],
)
def test_importing_a_room_loads_nothing_that_it_may_not(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print('\\n'.join(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "numpy" in loaded or "pydantic" in loaded or "typer" in loaded
    assert forbidden.isdisjoint(loaded)
