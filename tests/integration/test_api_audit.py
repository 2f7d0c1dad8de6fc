"""Every change by an operator leaves one entry in its transaction, and changes of entries are detected."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import text

import permille_service
from permille.exits import CommandError
from permille.schemas.access import FIRST_DIGEST, AuditEntry
from permille_service.cli.fleet import verify_entries
from permille_service.cli.session import Session
from tests.api_service import Api
from tests.tiny_model import write_model

WRITES = re.compile(r"database\.write\(|\.transact\(|repositories\.change\(")
NOTED_OR_NO_OPERATORS = {
    "_attach": "a device's upload",
    "_begin": "a device's upload",
    "_erasing": "notes what an operator erases",
    "_give_up": "a device's upload that failed",
    "change": "change_by notes it",
    "changing": "notes the change",
    "create_run": "a device's report",
    "ensure_token": "the first token, at the first start",
    "_note_seen": "when a token was used, which version a device was told",
    "once": "notes what it made",
    "start": "notes the job",
}


def entries(api: Api) -> list[AuditEntry]:
    return [AuditEntry.model_validate(one) for one in api.get("/v1/audit?limit=200").json()]


def test_changes_are_noted_with_who_what_and_the_request(api: Api) -> None:
    package = api.package()
    before = len(entries(api))
    api.publish(package)
    api.put("/v1/releases/tiny/aliases/canary", {"version": 1})
    api.delete("/v1/releases/tiny/aliases/canary")
    token = api.post("/v1/tokens", {"name": "ci", "role": "viewer"}).json()
    api.delete(f"/v1/tokens/{token['id']}")
    noted = entries(api)[before:]
    assert [(one.action, one.subject) for one in noted] == [
        ("create_release", "/v1/releases/tiny/versions/1"),
        ("put_alias", "/v1/releases/tiny/aliases/canary"),
        ("delete_alias", "/v1/releases/tiny/aliases/canary"),
        ("create_token", f"/v1/tokens/{token['id']}"),
        ("delete_token", f"/v1/tokens/{token['id']}"),
    ]
    assert noted[1].request == {"version": 1}
    own = next(one for one in api.get("/v1/tokens").json()["items"] if one["name"] == "first")
    assert {one.token_id for one in noted} == {own["id"]}
    assert token["secret"] not in "".join(one.model_dump_json() for one in noted)


def test_what_failed_or_was_sent_again_is_not_noted(api: Api) -> None:
    api.post("/v1/tenants", {"name": "acme"}, key="once")
    count = len(entries(api))
    assert api.post("/v1/tenants", {"name": "acme"}, key="once").status_code == 201
    assert api.post("/v1/tenants", {"name": "acme"}, key="twice").status_code == 409
    assert api.put("/v1/releases/none/aliases/stable", {"version": 1}).status_code == 404
    assert len(entries(api)) == count


@pytest.mark.attack(13, "one request sent many times at once, to note a job twice")
def test_a_job_asked_for_many_times_at_once_is_noted_once(api: Api) -> None:
    write_model(api.service.settings.model_root / "tiny")
    source = {"kind": "folder", "path": "tiny"}
    model_id = api.post("/v1/models", {"name": "tiny", "source": source}).json()["id"]
    before = len(entries(api))
    body = {"model_id": model_id, "method": "random"}
    with ThreadPoolExecutor(8) as pool:
        jobs = list(pool.map(lambda _: api.post("/v1/masks", body, key="once").json()["id"], range(8)))
    assert len(set(jobs)) == 1
    assert [one.action for one in entries(api)[before:]] == ["create_mask"]


class Lines:
    """A session of the command line whose client asks the app."""

    def __init__(self, api: Api) -> None:
        self.api, self.client = api, self

    def get(self, path: str, **params: int) -> Any:
        return self.api.get(path, params=params).json()


@pytest.mark.attack(13, "audit entries changed or taken out")
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE audit_entries SET subject = 'x' WHERE seq = 2",
        "UPDATE audit_entries SET token_id = 'x' WHERE seq = 2",
        "DELETE FROM audit_entries WHERE seq = 2",
    ],
)
def test_an_entry_that_was_changed_or_taken_out_is_found(api: Api, change: str) -> None:
    session = cast(Session, Lines(api))
    assert verify_entries(session) == {"entries": 0, "digest": FIRST_DIGEST}
    for name in ("a", "b", "c"):
        api.post("/v1/tokens", {"name": name, "role": "viewer"})
    written = entries(api)[1].digest
    assert verify_entries(session, FIRST_DIGEST)["entries"] == 3
    assert verify_entries(session, written) == {"entries": 3, "digest": entries(api)[-1].digest}
    with pytest.raises(CommandError, match="entries has the digest"):
        verify_entries(session, "sha256:" + "1" * 64)
    with api.service.database.write() as database:
        database.execute(text(change))
    with pytest.raises(CommandError, match="somebody changed the log"):
        verify_entries(session, written)


def writers_in(folder: Path) -> set[str]:
    """Return the functions of a folder that open a write transaction of the database directly."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    writers = set()
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for function in (node for node in ast.walk(tree) if isinstance(node, kinds)):
            called = (ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call))
            if path.name != "enrolment.py" and any(WRITES.search(f"{name}(") for name in called):
                writers.add(function.name)
    return writers


def test_no_route_of_operators_writes_without_a_note() -> None:
    """This detects a new route that opens a write transaction of the database directly."""
    assert writers_in(Path(permille_service.__file__).parent) == set(NOTED_OR_NO_OPERATORS)
