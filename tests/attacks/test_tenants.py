"""A tenant that probes for another tenant's paths, ids, digests and blobs.

The answer is the same for data of another tenant and for data that do not exist: same status, same body.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from permille.files import follow_inside
from permille.schemas.access import Role
from permille.schemas.fields import EXAMPLE_ULID
from permille.store.jobs import claims
from permille_workers.runtime.child import attempt
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.tasks import TASKS
from tests.api_service import Api, new_run_id, run_metrics, running_api
from tests.rounds.site import SMALL, make_site, request_of
from tests.tiny_model import write_corpus, write_model

SPY = "spy"
UNKNOWN_DIGEST = "sha256:" + "5" * 64


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """Run a service whose first tenant has a model and a corpus on disk."""
    with running_api(tmp_path) as running:
        write_model(running.service.settings.model_root / "tiny")
        write_corpus(running.service.settings.corpus_root / "texts.jsonl")
        yield running


def new_tenant(api: Api) -> tuple[str, str]:
    """Make a tenant. Return its id and an administrator's token of it."""
    tenant_id = api.post("/v1/tenants", {"name": SPY}).json()["id"]
    body = {"name": "t", "role": Role.ADMIN, "tenant_id": tenant_id}
    return tenant_id, api.post("/v1/tokens", body).json()["secret"]


def register(api: Api, collection: str, path: str, token: str) -> tuple[int, str]:
    """Register a source. Return the status and the body of the answer."""
    kind = "folder" if collection == "models" else "file"
    body = {"name": "mine", "source": {"kind": kind, "path": path}}
    answer = api.post(f"/v1/{collection}", body, token)
    return answer.status_code, answer.text


@pytest.mark.attack(1, "registers another tenant's folder or file")
@pytest.mark.parametrize(("collection", "path"), [("models", "tiny"), ("corpora", "texts.jsonl")])
def test_a_path_of_another_tenant_is_none(api: Api, collection: str, path: str) -> None:
    _, token = new_tenant(api)
    assert register(api, collection, path, api.token)[0] == 201
    theirs = register(api, collection, path, token)
    missing = register(api, collection, path.replace("t", "x"), token)
    assert theirs[0] == 404
    assert theirs == (missing[0], missing[1].replace(path.replace("t", "x"), path))
    assert api.get(f"/v1/{collection}", token).json()["items"] == []


@pytest.mark.attack(1, "registers a link out of its own folder")
@pytest.mark.parametrize("collection", ["models", "corpora"])
def test_a_link_answers_alike_wherever_it_leads(api: Api, collection: str, tmp_path: Path) -> None:
    tenant_id, token = new_tenant(api)
    settings = api.service.settings
    root = settings.tenant_root / tenant_id / collection
    theirs = settings.model_root / "tiny" if collection == "models" else settings.corpus_root / "texts.jsonl"
    link = root / "entry.jsonl"
    answers = set()
    for target in (
        None,
        theirs,
        theirs.with_name("missing"),
        "/",
        "entry.jsonl",
        os.path.relpath(theirs, root),
    ):
        link.unlink(missing_ok=True)
        if target is not None:
            link.symlink_to(target)
        answers.add(register(api, collection, link.name, token))
    assert len(answers) == 1
    assert answers.pop()[0] == 404


@pytest.mark.attack(1, "links single files of a model out of its own folder")
@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json", "unread.json"])
def test_a_link_in_a_model_answers_alike_wherever_it_leads(api: Api, name: str) -> None:
    tenant_id, token = new_tenant(api)
    settings = api.service.settings
    folder = write_model(settings.tenant_root / tenant_id / "models" / "mine")
    link = folder / name
    answers = set()
    for target in (settings.model_root / "tiny" / "model.safetensors", "/no/such/file"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        answers.add(register(api, "models", "mine", token))
    assert len(answers) == 1
    assert answers.pop()[0] == 409


@pytest.mark.attack(1, "times how long a look outside of its folder takes")
def test_nothing_outside_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "deep").mkdir(parents=True)
    (outside / "secret").mkdir(parents=True)
    (root / "up").symlink_to("deep/../../outside/secret")
    (root / "far").symlink_to(outside)
    (root / "chain").symlink_to("far/secret")
    looked: list[str] = []
    for name in ("stat", "lstat", "readlink"):
        real: Callable[..., Any] = getattr(os, name)

        def spied(path: Any, *more: Any, real: Callable[..., Any] = real, **options: Any) -> Any:
            looked.append(os.fspath(path))
            return real(path, *more, **options)

        monkeypatch.setattr(os, name, spied)
    for path in ("up", "far", "far/secret", "chain", "../outside", "/etc"):
        assert follow_inside(root, path) is None
    assert follow_inside(root, "deep") == root / "deep"
    assert looked
    assert not [path for path in looked if path.startswith(str(outside))]


@pytest.mark.attack(1, "swaps its registered folder for a link to another tenant's before the job runs")
def test_a_folder_that_was_swapped_is_refused_at_job_time(api: Api) -> None:
    tenant_id, token = new_tenant(api)
    settings = api.service.settings
    folder = write_model(settings.tenant_root / tenant_id / "models" / "mine", seed=1)
    body = {"name": "mine", "source": {"kind": "folder", "path": "mine"}}
    model_id = api.post("/v1/models", body, token).json()["id"]
    job = api.post("/v1/masks", {"model_id": model_id, "method": "random"}, token).json()
    shutil.rmtree(folder)
    folder.symlink_to(settings.model_root / "tiny")
    with api.service.database.write() as session:
        claim = claims.claim(session, worker="w", lease_s=60, job_id=job["id"])
    assert claim is not None
    attempt(
        TASKS, api.service.database, claim, WorkerSettings.model_validate({"data_dir": settings.data_dir})
    )
    after = api.get(f"/v1/jobs/{job['id']}", token).json()
    assert after["state"] == "failed"
    assert "There is no folder at 'mine' below the model root" in str(after["error"])


@pytest.mark.attack(1, "asks every route for another tenant's ids and digests")
def test_what_another_tenant_has_answers_as_what_nobody_has(api: Api) -> None:
    _, token = new_tenant(api)
    package = api.package()
    api.publish(package, name="theirs")
    assert register(api, "models", "tiny", api.token)[0] == 201
    assert register(api, "corpora", "texts.jsonl", api.token)[0] == 201
    device = api.device(release="theirs")
    run_id = new_run_id()
    api.post("/v1/runs", {"run_id": run_id, "metrics": run_metrics()}, device.token())
    listed = {
        name: api.get(f"/v1/{name}").json()["items"]
        for name in ("models", "corpora", "tokens", "invitations")
    }
    model_id = listed["models"][0]["id"]
    job_id = api.post("/v1/masks", {"model_id": model_id, "method": "random"}).json()["id"]
    real = {
        "model": model_id,
        "corpus": listed["corpora"][0]["id"],
        "operator": listed["tokens"][0]["id"],
        "inv": listed["invitations"][0]["id"],
        "dev": device.id,
        "job": job_id,
        "run": run_id,
        "package": package.digest,
        "blob": package.manifest.layers[0].digest,
        "release": "theirs",
        "fed": make_site(api, name="theirs", release="theirs").id,
    }
    none = {
        name: f"{name}_{EXAMPLE_ULID}" for name in ("model", "corpus", "operator", "inv", "dev", "job", "fed")
    }
    none |= {
        "run": new_run_id(),
        "package": UNKNOWN_DIGEST,
        "blob": "sha256:" + "6" * 64,
        "release": "nobodys",
    }

    def answer(method: str, path: str, body: Any, names: dict[str, str]) -> tuple[int, str]:
        def filled(value: Any) -> Any:
            if isinstance(value, str):
                return value.format(**names)
            return {key: filled(item) for key, item in value.items()} if isinstance(value, dict) else value

        found = api.client.request(method, filled(path), headers=api.auth(token), json=filled(body))
        text = found.text
        for name, value in names.items():
            text = text.replace(value, f"<{name}>")
        return found.status_code, text

    mask = {"method": "fisher", "corpus_id": "{corpus}"}
    asked: list[tuple[str, str, Any]] = [
        *(("GET", f"/v1/{path}", None) for path in _READS),
        *(("POST", f"/v1/{path}", None) for path in ("jobs/{job}/cancel", "jobs/{job}/retry")),
        *(("DELETE", f"/v1/{path}", None) for path in _DELETES),
        ("POST", "/v1/devices/{dev}/revoke", None),
        ("POST", "/v1/masks", {"model_id": "{model}", **mask}),
        ("POST", "/v1/quantizations", {"model_id": "{model}", "evaluation_corpus_id": "{corpus}"}),
        ("POST", "/v1/builds", {"model_id": "{model}", "mask": mask}),
        ("POST", "/v1/preflights", {"kind": "mask", "request": {"model_id": "{model}", **mask}}),
        *(("POST", f"/v1/federations/{{fed}}/{path}", {}) for path in _OF_FEDERATIONS),
        ("POST", "/v1/federations", request_of(SMALL | {"release": "{release}"})),
        ("POST", "/v1/releases", {"name": "mine", "package_digest": "{package}"}),
        ("PUT", "/v1/releases/{release}/aliases/stable", {"version": 1}),
        ("POST", "/v1/releases/{release}/versions/1/yank", {"reason": "mine"}),
    ]
    for method, path, body in asked:
        found, unknown = answer(method, path, body, real), answer(method, path, body, none)
        assert found == unknown, (method, path)
        assert found[0] in (200, 404), (method, path, found)
        assert found[0] == 404 or '"items":[]' in found[1] or found[1] == "[]", (method, path, found)
    assert api.get(f"/v1/runs/{run_id}").status_code == 200


_READS = (
    "models/{model}",
    "corpora/{corpus}",
    "jobs/{job}",
    "jobs/{job}/events",
    "jobs/{job}/events/stream",
    "builds/{job}",
    "devices/{dev}",
    "runs/{run}",
    "runs?device_id={dev}",
    "masks?model_id={model}",
    "packages/{package}",
    "packages/{package}/manifest",
    "packages/{package}/blobs/{blob}",
    "releases/{release}/versions/1",
    "releases/{release}/aliases/stable",
    "releases?name={release}",
    "federations/{fed}",
    "federations/{fed}/definition",
    "federations/{fed}/history",
    "federations/{fed}/rounds",
    "federations/{fed}/rounds/0",
    "federations/{fed}/rounds/0/record",
)
_OF_FEDERATIONS = ("start", "pause", "finish", "adoptions")
_DELETES = (
    "models/{model}",
    "corpora/{corpus}",
    "tokens/{operator}",
    "invitations/{inv}",
    "runs/{run}",
    "runs/{run}/log",
    "releases/{release}/aliases/stable",
)
