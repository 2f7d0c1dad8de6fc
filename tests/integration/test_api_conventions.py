"""Conventions of every route: problems, hosts, limits, headers, idempotency, pages, the OpenAPI document."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from permille.schemas.problems import MEDIA_TYPE, TYPE_BASE, ProblemType
from permille.store.jobs import queue
from permille_service import guard
from permille_service.creation import Creation
from tests.api_service import Api, new_run_id, run_metrics, running_api
from tests.tiny_model import write_model
from tests.unit.store.postgres import empty_database

METHODS = ("get", "put", "post", "delete", "head", "patch")


def problem_of(answer: Any) -> dict[str, Any]:
    """Return the problem of an answer, after a check of its form."""
    assert answer.headers["content-type"] == MEDIA_TYPE
    body: dict[str, Any] = answer.json()
    assert body["status"] == answer.status_code
    assert body["type"].startswith(TYPE_BASE)
    assert {"title", "detail", "instance"} <= set(body)
    return body


def operations(api: Api) -> list[tuple[str, str, dict[str, Any]]]:
    """Return method, path and description of all documented operations."""
    document = api.client.get("/openapi.json").json()
    return [
        (method, path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    ]


def test_the_page_of_errors_has_every_type() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "api-errors.md"
    assert set(re.findall(r"`([a-z-]+)`", page.read_text())) >= {problem.value for problem in ProblemType}


def test_unknown_path_is_a_problem(api: Api) -> None:
    body = problem_of(api.get("/v1/nothing"))
    assert body["type"] == TYPE_BASE + "not-found"
    assert body["instance"] == "/v1/nothing"


def test_wrong_method_names_all_methods_of_the_path(api: Api) -> None:
    answer = api.client.patch("/v1/models")
    assert problem_of(answer)["type"] == TYPE_BASE + "method-not-allowed"
    assert answer.headers["allow"] == "GET, POST"
    name = "/v1/releases/tiny/aliases/stable"
    assert api.client.post(name).headers["allow"] == "DELETE, GET, PUT"


def test_wrong_body_names_the_field_and_hides_the_value(api: Api) -> None:
    answer = api.post("/v1/models", {"name": "SECRET VALUE", "source": {"kind": "folder", "path": "a"}})
    body = problem_of(answer)
    assert answer.status_code == 422
    assert body["errors"][0]["location"] == "body.name"
    assert "SECRET" not in answer.text


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/audit"])
def test_a_parameter_that_comes_twice_is_refused(api: Api, path: str) -> None:
    answer = api.get(f"{path}?limit=no&limit=0&limit=5&other=1&other=2")
    assert answer.status_code == 422
    errors = [{"location": "query.limit", "message": "Give it once, not 3 times"}]
    assert problem_of(answer)["errors"] == errors


@pytest.mark.parametrize("limit", [0, 201])
def test_a_page_out_of_bounds_is_refused(api: Api, limit: int) -> None:
    answer = api.get(f"/v1/jobs?limit={limit}")
    assert answer.status_code == 422
    assert problem_of(answer)["errors"][0]["location"] == "query.limit"


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/models", "/v1/packages", "/v1/runs", "/v1/devices"])
@pytest.mark.parametrize("cursor", ["x", "zzz", "0", "model_1", "%00"])
def test_a_cursor_that_no_page_returned_is_refused(api: Api, path: str, cursor: str) -> None:
    answer = api.get(f"{path}?cursor={cursor}")
    assert answer.status_code == 422
    assert problem_of(answer)["errors"][0]["location"] == "query.cursor"


@pytest.mark.parametrize(
    ("path", "damage"),
    [
        ("jobs", "UPDATE jobs SET state = 'foo' WHERE id = :first"),
        ("jobs", "UPDATE jobs SET kind = 'foo' WHERE id = :first"),
        ("packages", "UPDATE artifacts SET request = '{no JSON' WHERE digest = :first"),
        ("devices", "UPDATE devices SET created_at = 'yesterday' WHERE id = :first"),
        ("jobs", "UPDATE jobs SET created_at = 1700000000000000000000 WHERE id = :first"),
        ("devices", "UPDATE devices SET release = 'No Name' WHERE id = :first"),
        ("runs", "UPDATE runs SET metrics = '{}' WHERE run_id = :first"),
        (
            "runs",
            "UPDATE runs SET log_state = 'foo', log_form = '', log_digest = '' WHERE run_id = :first",
        ),
        ("packages", "UPDATE artifacts SET request = '[]' WHERE digest = :first"),
        ("releases", "UPDATE releases SET package_digest = 'foo' WHERE package_digest = :first"),
    ],
)
def test_a_damaged_row_does_not_hide_the_others(
    api: Api, caplog: pytest.LogCaptureFixture, path: str, damage: str
) -> None:
    for seed in (0, 1):
        api.publish(api.package(seed=seed))
        body = {"run_id": new_run_id(), "metrics": run_metrics()}
        assert api.post("/v1/runs", body, api.device().token()).status_code == 201

    def listed() -> list[str]:
        answer = api.get(f"/v1/{path}")
        assert answer.status_code == 200, answer.text
        keys = ("id", "run_id", "digest", "manifest_digest")
        return [next(row[key] for key in keys if row.get(key)) for row in answer.json()["items"]]

    *others, first = listed()
    with api.service.database.write() as session:
        session.execute(text(damage), {"first": first})
    assert listed() == others and others
    assert "a list leaves out the damaged row" in caplog.text


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"name": "\\ud800"}', b"[]", b"NaN"])
def test_unreadable_body_is_refused(api: Api, content: bytes) -> None:
    headers = api.auth() | {"Content-Type": "application/json"}
    answer = api.client.post("/v1/tenants", content=content, headers=headers)
    assert answer.status_code in (400, 422)
    problem_of(answer)


def test_unknown_field_is_refused(api: Api) -> None:
    assert api.post("/v1/tenants", {"name": "acme", "admin": True}).status_code == 422


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", ""])
def test_foreign_host_is_refused_on_every_path(api: Api, host: str) -> None:
    for path in ("/v1/health", "/docs", "/openapi.json", "/static/docs.js"):
        answer = api.client.get(path, headers={"Host": host})
        assert answer.status_code == 421, path
        problem_of(answer)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8321", "127.0.0.1:1", "[::1]:8321"])
def test_loopback_host_is_answered(api: Api, host: str) -> None:
    assert api.client.get("/v1/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("address", ["192.0.2.7", "[2001:db8::7]"])
def test_a_pod_answers_to_its_own_address_alone(api: Api, address: str) -> None:
    pod = TestClient(api.client.app, f"http://{address}:8321")
    assert pod.get("/livez").status_code == 200
    for host in ("192.0.2.8", "[2001:db8::8]", "evil.example", f"{address}.evil.example"):
        assert pod.get("/livez", headers={"Host": host}).status_code == 421, host


def test_configured_host_is_answered(tmp_path: Path) -> None:
    with running_api(tmp_path, allowed_hosts=("Models.example", "2001:DB8::7", "[2001:db8::8]")) as api:
        for host in ("models.example:443", "[2001:db8::7]:443", "[2001:db8::8]"):
            assert api.client.get("/v1/health", headers={"Host": host}).status_code == 200
        assert api.client.get("/v1/health", headers={"Host": "other.example"}).status_code == 421


def test_large_body_is_refused_by_its_length_and_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_BODY_BYTES", 2048)
    with running_api(tmp_path) as api:
        headers = api.auth() | {"Content-Type": "application/json"}
        for content in (b"[" + b" " * 4096, iter([b"[", b" " * 4096])):
            answer = api.client.post("/v1/tenants", content=content, headers=headers)
            assert answer.status_code == 413
            assert problem_of(answer)["type"] == TYPE_BASE + "too-large"


def test_answers_carry_security_headers_and_allow_no_other_origin(api: Api) -> None:
    for answer in (api.client.get("/v1/health"), api.client.get("/v1/masks"), api.client.get("/docs")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert api.get("/v1/masks").headers["cache-control"] == "no-store"
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "GET"}
    for answer in (
        api.client.get("/v1/health", headers=asked),
        api.client.options("/v1/models", headers=asked),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("body", "places"),
    [
        (b'{"name":"a","name":"b","source":{"kind":"streamed","dataset":"c4"}}', ["body.name"]),
        (b'{"name":"a","name":"a","source":{"kind":"streamed","dataset":"c4"}}', ["body.name"]),
        (
            b'{"name":"a","source":{"kind":"streamed","kind":"file","dataset":"c4","dataset":"c4"}}',
            ["body.kind", "body.dataset"],
        ),
        (
            '{"name":"a","n\\u0061me":"b","source":{"kind":"streamed","dataset":"c4"}}'.encode("utf-16"),
            ["body.name"],
        ),
    ],
)
def test_a_repeated_key_of_a_body_is_refused(api: Api, body: bytes, places: list[str]) -> None:
    headers = {**api.auth(), "Content-Type": "application/json"}
    answer = api.client.post("/v1/corpora", content=body, headers=headers)
    assert answer.status_code == 422
    assert [error["location"] for error in problem_of(answer)["errors"]] == places
    assert api.get("/v1/corpora").json()["items"] == []


@pytest.mark.parametrize("content_type", ["text/json", "application/json", ""])
@pytest.mark.parametrize("body", [b"", b'{"name": ', b"[" * 100_000, b"\xff\xfe"])
def test_a_body_that_is_no_json_is_refused(api: Api, body: bytes, content_type: str) -> None:
    answer = api.client.post(
        "/v1/corpora", content=body, headers={**api.auth(), "Content-Type": content_type}
    )
    assert answer.status_code in (400, 422)
    problem_of(answer)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/v1/health"])
def test_a_load_balancer_may_ask_for_the_head_of_health(api: Api, path: str) -> None:
    head, whole = api.client.head(path), api.client.get(path)
    assert (head.status_code, head.headers["content-length"]) == (200, whole.headers["content-length"])


def test_same_key_and_body_make_one_thing(api: Api) -> None:
    body = {"name": "c", "source": {"kind": "streamed", "dataset": "c4"}}
    first = api.post("/v1/corpora", body, key="k-1")
    again = api.post("/v1/corpora", body, key="k-1")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert first.headers["location"] == again.headers["location"] == f"/v1/corpora/{first.json()['id']}"
    assert len(api.get("/v1/corpora").json()["items"]) == 1


def test_same_key_with_another_body_is_a_conflict(api: Api) -> None:
    api.post("/v1/tenants", {"name": "one"}, key="k-1")
    answer = api.post("/v1/tenants", {"name": "two"}, key="k-1")
    assert problem_of(answer)["type"] == TYPE_BASE + "idempotency-conflict"
    names = {item["name"] for item in api.get("/v1/tenants").json()["items"]}
    assert names == {"main", "one"}


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_key_is_refused_once_what_it_made_was_removed(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "models" / "tiny")
    corpus = {"name": "c", "source": {"kind": "streamed", "dataset": "c4"}}
    model = {"name": "tiny", "source": {"kind": "folder", "path": "tiny"}}
    token = {"name": "ci", "role": "viewer"}
    with (
        empty_database(database, tmp_path) as url,
        running_api(tmp_path, database_url=url, model_root=tmp_path / "models") as api,
    ):
        model_id = api.post("/v1/models", model).json()["id"]
        build = {"model_id": model_id, "mask": {"method": "random", "density": 0.01}}
        asked = {"corpora": corpus, "tokens": token, "invitations": {"release": "tiny"}, "builds": build}
        made = {name: api.post(f"/v1/{name}", body, key=f"k-{name}") for name, body in asked.items()}
        for name, first in made.items():
            again = api.post(f"/v1/{name}", asked[name], key=f"k-{name}")
            assert again.json()["id"] == first.json()["id"]
        ids = {name: first.json()["id"] for name, first in made.items()}
        assert api.post(f"/v1/jobs/{ids['builds']}/cancel").status_code == 202
        assert api.post(f"/v1/invitations/{ids['invitations']}/revoke").status_code == 204
        for name in ("corpora", "tokens", "builds"):
            assert api.client.delete(f"/v1/{name}/{ids[name]}", headers=api.auth()).status_code == 204
        for name, body in asked.items():
            refused = problem_of(api.post(f"/v1/{name}", body, key=f"k-{name}"))
            assert refused["type"] == TYPE_BASE + "idempotency-conflict"
            assert "was removed" in refused["detail"]
            anew = api.post(f"/v1/{name}", body, key=f"l-{name}")
            assert anew.status_code == made[name].status_code
            assert anew.json()["id"] != ids[name]
        looks: list[object] = []
        stored: list[Any] = []

        def meeting(look: Callable[..., Any]) -> Callable[..., Any]:
            """Let an equal request be stored between the first and the second look-up of a request."""

            def met(*arguments: object) -> Any:
                looks.append(look)
                if len(looks) == 2:
                    stored.append(api.post("/v1/builds", build, key="m"))
                return look(*arguments)

            return met

        monkeypatch.setattr(queue, "find_submitted", meeting(queue.find_submitted))
        monkeypatch.setattr(Creation, "_find_kept", meeting(Creation._find_kept))
        assert api.post("/v1/builds", build, key="m").json()["id"] == stored[0].json()["id"]
        if database == "postgresql":  # SQLite has one writer at a time
            monkeypatch.undo()
            find_kept = Creation._find_kept

            def meet(*arguments: Any) -> Any:
                found = find_kept(*arguments)
                monkeypatch.undo()
                stored.append(api.post("/v1/corpora", {**corpus, "name": "d"}, key="n"))
                return found

            monkeypatch.setattr(Creation, "_find_kept", meet)
            again = api.post("/v1/corpora", {**corpus, "name": "d"}, key="n")
            assert again.json() == stored[-1].json(), "expected no conflict with its own first sending"


def test_repeated_invitation_shows_the_same_code_and_the_database_holds_it_sealed(api: Api) -> None:
    body = {"release": "tiny"}
    first = api.post("/v1/invitations", body, key="k-1").json()
    assert api.post("/v1/invitations", body, key="k-1").json() == first
    stored = b"".join(path.read_bytes() for path in api.service.settings.data_dir.glob("permille.db*"))
    assert first["invitation"].encode() not in stored
    assert first["id"].encode() in stored


def test_pages_hold_every_row_once(api: Api) -> None:
    for number in range(5):
        api.post("/v1/tenants", {"name": f"t{number}"})
    seen: list[str] = []
    cursor = None
    while True:
        page = api.get("/v1/tenants", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        assert len(page["items"]) <= 2
        seen += [item["name"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ["t4", "t3", "t2", "t1", "t0", "main"]


def test_document_names_every_operation_once_and_its_errors(api: Api) -> None:
    found = operations(api)
    names = [operation["operationId"] for _, _, operation in found]
    assert len(found) > 50
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z_]+", name) for name in names)
    for method, path, operation in found:
        errors = {int(status) for status in operation["responses"] if int(status) >= 400}
        assert {421, 422, 503} <= errors, (method, path)
        for status in errors:
            content = operation["responses"][str(status)]["content"]
            assert list(content) == [MEDIA_TYPE], (method, path, status)
            assert content[MEDIA_TYPE]["examples"]
        if operation.get("security"):
            assert {401, 403} <= errors, (method, path)
        if "{" in path and operation.get("security"):
            assert 404 in errors, (method, path)


def test_only_health_and_enrolment_are_open(api: Api) -> None:
    open_paths = {path for _, path, operation in operations(api) if not operation.get("security")}
    assert open_paths == {"/v1/health", "/v1/enrolments", "/v1/device-tokens", "/v1/device-tokens/nonces"}


def test_docs_name_nothing_outside_of_the_server(api: Api) -> None:
    page = api.client.get("/docs").text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert links
    for link in links:
        assert link.startswith("/static/")
        assert api.client.get(link).status_code == 200
    assert "http" not in api.client.get("/static/docs.js").text
    assert "url(http" not in api.client.get("/static/swagger-ui.css").text


def test_every_group_of_routes_is_described(api: Api) -> None:
    described = {tag["name"] for tag in api.client.get("/openapi.json").json()["tags"]}
    assert described == {tag for _, _, operation in operations(api) for tag in operation["tags"]}


def test_failure_of_the_service_is_a_problem_without_its_cause(api: Api) -> None:
    api.service.database.close()
    path = api.service.settings.data_dir / "permille.db"
    for file in path.parent.glob("permille.db*"):
        file.unlink()
    answer = api.get("/v1/models")
    assert answer.status_code in (500, 503)
    problem_of(answer)
    assert "sqlite" not in answer.text.lower()
