"""Each extension can be removed: programs start, the API loses only its routes, and the core's tests pass."""

import json
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from permille.schemas.work import WorkKind
from permille_service.app import create_app
from permille_service.extension import ServiceExtension
from permille_service.settings import load
from tests.integration.job_site import wait_until
from tests.running_service import running_service
from tests.tiny_model import write_model
from tests.without import EXTENSIONS, ROOT, Without, own_tests, remove, without_entries

CORE_TESTS = (
    "tests/unit/test_command_names.py",
    "tests/unit/service/test_routes.py",
    "tests/unit/edge_agent/link/test_pull.py",
    "tests/unit/edge_agent/link/test_forget.py",
    "tests/unit/edge_agent/cli/test_main.py",
    "tests/integration/test_api_conventions.py",
)
CONSOLE = "permille_console"
HELP = (("permille_service.cli.main", "--help"), ("permille_agent", "--help"))


@pytest.fixture(scope="module", params=EXTENSIONS)
def removed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Without]:
    """Return an extension, and a copy without it."""
    name = str(request.param)
    return name, remove(name, tmp_path_factory.mktemp(name))


@pytest.mark.slow
def test_an_import_of_the_removed_extension_is_an_error(removed: tuple[str, Without]) -> None:
    name, copy = removed
    ended = copy.run("-P", "-c", f"import permille, {name}")
    assert f"{name} was removed" in ended.stderr
    where = copy.run("-P", "-c", "import permille; print(permille.__file__)")
    assert where.stdout.startswith(str(copy.installed))


@pytest.mark.slow
def test_programs_start_and_the_api_loses_only_the_routes_of_the_extension(
    removed: tuple[str, Without], tmp_path: Path
) -> None:
    name, copy = removed
    write_model(tmp_path / "data" / "models" / "tiny")
    settings = {"real": "yes", "PYTHONPATH": str(copy.installed), "PYTHONSAFEPATH": "1"}
    with running_service(tmp_path, **settings) as up, up.client() as client:
        found = client.get("/openapi.json").json()
        first = client.get("/", follow_redirects=False).headers["location"]
        assert first == ("/docs" if name == CONSOLE else "/ui")
        source = {"kind": "folder", "path": "tiny"}
        model = client.post("/v1/models", json={"name": "tiny", "source": source}).json()["id"]
        job = client.post("/v1/masks", json={"model_id": model, "method": "random"}).json()
        path = f"/v1/jobs/{job['id']}"
        wait_until(
            lambda: client.get(path).json()["state"] == "succeeded", lambda: str(client.get(path).json())
        )
    log = (tmp_path / "up.log").read_text()
    assert "Traceback" not in log and "Error" not in log, log
    assert up.process.returncode == 0
    assert found == document_without(name, tmp_path / "full")
    for module, option in HELP:
        ended = copy.run("-P", "-m", module, option)
        assert ended.returncode == 0, ended.stderr
        assert name not in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tests_of_the_core_pass(removed: tuple[str, Without]) -> None:
    name, copy = removed
    console = () if name == CONSOLE else ("tests/console/test_page_actions.py",)
    ended = copy.run("-m", "pytest", "-q", *CORE_TESTS, *console)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def document_without(name: str, folder: Path) -> dict[str, Any]:
    """Return the API's document without the operations, tags and schemas of an extension."""
    app = create_app(load(data_dir=folder))
    document: dict[str, Any] = json.loads(json.dumps(app.openapi()))
    app.state.service.close()
    schemas = document["components"]["schemas"]
    kept = reached(document["paths"], schemas)
    assert set(schemas) - kept <= reached(schemas["Problem"], schemas) | {"Problem"}
    for entry in entry_points(group="permille.service"):
        if entry.value.startswith(f"{name}."):
            part: ServiceExtension = entry.load()
            tags = {tag["name"] for tag in part.tags}
            document["tags"] = [tag for tag in document["tags"] if tag["name"] not in tags]
            for route in (route for router in part.routers for route in router.routes):
                assert isinstance(route, APIRoute)
                for method in route.methods if route.include_in_schema and route.methods else ():
                    del document["paths"][route.path][method.lower()]
    for entry in entry_points(group="permille.kinds"):
        if entry.value.startswith(f"{name}.") and isinstance(kind := entry.load(), WorkKind):
            remove_kind(document, kind)
    document["paths"] = {path: item for path, item in document["paths"].items() if item}
    lost = kept - reached(document["paths"], schemas)
    document["components"]["schemas"] = {key: one for key, one in schemas.items() if key not in lost}
    return document


def remove_kind(document: dict[str, Any], work: WorkKind) -> None:
    """Remove the routes and the tag of a kind of job, and its form of a preflight."""
    document["tags"] = [tag for tag in document["tags"] if tag["name"] != work.collection]
    for path, item in document["paths"].items():
        if f"{path}/".startswith(f"/v1/{work.collection}/"):
            item.clear()
    body = document["paths"]["/v1/preflights"]["post"]["requestBody"]
    content = body["content"]["application/json"]
    shown, forms = content["examples"], content["schema"]
    content["examples"] = {name: one for name, one in shown.items() if not name.startswith(f"{work.kind}: ")}
    form = forms["discriminator"]["mapping"].pop(work.kind.value)
    forms["oneOf"].remove({"$ref": form})


def reached(part: object, schemas: dict[str, Any]) -> set[str]:
    """Return the names of all schemas to which a part of the document refers, directly or not."""
    found, waiting = set[str](), [part]
    while waiting:
        names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(waiting.pop()))) - found
        found |= names
        waiting += (schemas[name] for name in names)
    return found


def test_the_entry_points_of_an_extension_are_removed_and_no_others() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for name in EXTENSIONS:
        left = without_entries(project, name)
        assert name in project and name not in left
        assert "permille_lab.evaluate.command:evaluate" in left


def test_a_test_that_imports_an_extension_through_another_module_is_one_of_its_tests(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    (folder / "wishes").mkdir(parents=True)
    for path, text in (
        ("wishes/test_wishes.py", ""),
        ("site.py", "from permille_wishes.store import wishes\n"),
        ("test_page.py", "from tests import site\n"),
        ("test_core.py", "from permille.store import rows\n"),
    ):
        (folder / path).write_text(text)
    found = own_tests("permille_wishes", tmp_path)
    assert [path.name for path in found] == ["site.py", "test_page.py", "test_wishes.py"]
