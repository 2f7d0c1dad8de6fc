"""The pages' lists of runs and changes: filters in the address, comparisons, names instead of ids."""

import re
from html import unescape
from typing import Any

from sqlalchemy import text
from starlette.testclient import TestClient

from permille.choices import StreamedDataset
from permille.schemas.access import Role
from permille.schemas.inputs import FileCorpus, FolderModel, GgufModel, HubModel, StreamedCorpus
from permille.schemas.jobs import JobKind
from permille.store import access, inputs, tables
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from tests.api_service import URL, Api, TestDevice, new_run_id, run_metrics
from tests.artifacts import some_model

OWN = {"Sec-Fetch-Site": "same-origin"}


def signed_in(api: Api, token: str | None = None) -> TestClient:
    client = TestClient(api.client.app, base_url=URL, raise_server_exceptions=False, follow_redirects=False)
    client.post("/ui/sign-in", data={"token": token or api.token}, headers=OWN)
    return client


def rows_of(answer: Any) -> list[str]:
    """Return the text of each row of a page's tables."""
    assert answer.status_code == 200, answer.text
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", answer.text, re.DOTALL)
    return [" ".join(unescape(re.sub(r"<[^>]+>", " ", row)).split()) for row in rows[1:]]


def test_a_damaged_job_does_not_hide_the_others(api: Api) -> None:
    _, (kept, damaged) = add_masks(api)
    with api.service.database.write() as session:
        session.execute(text("UPDATE jobs SET state = 'foo' WHERE id = :id"), {"id": damaged})
    shown = signed_in(api).get("/ui/jobs")
    assert (shown.status_code, kept in shown.text, damaged in shown.text) == (200, True, False)


def test_a_damaged_release_does_not_hide_the_others(api: Api) -> None:
    for name in ("damaged", "kept"):
        api.publish(api.package(), name=name)
    with api.service.database.write() as session:
        session.execute(text("UPDATE releases SET created_at = 'foo' WHERE name = 'damaged'"))
    shown = signed_in(api).get("/ui/releases")
    assert (shown.status_code, ">kept" in shown.text, ">damaged" in shown.text) == (200, True, False)


def test_models_and_corpora_of_every_source_are_listed(api: Api) -> None:
    sources: dict[str, FolderModel | GgufModel | HubModel] = {
        "of-folder": FolderModel(kind="folder", path="tiny"),
        "of-file": GgufModel(kind="gguf", path="model.gguf"),
        "of-hub": HubModel(kind="hub", repository="owner/name", commit="0" * 40),
    }
    streamed = StreamedCorpus(kind="streamed", dataset=StreamedDataset.C4)
    with api.service.database.write() as session:
        for name, source in sources.items():
            inputs.add_model(session, tenant_id=api.tenant_id, name=name, source=source)
        inputs.add_corpus(session, tenant_id=api.tenant_id, name="c4", source=streamed, size_bytes=None)
    rows = rows_of(signed_in(api).get("/ui/models"))
    for name, place in {"of-folder": "tiny", "of-file": "model.gguf", "of-hub": "owner/name"}.items():
        assert [place in row for row in rows if row.startswith(name)] == [True]
    assert [row.startswith("c4") for row in rows].count(True) == 1


def add_masks(api: Api) -> tuple[str, list[str]]:
    """Queue two masks of a model and of a corpus with a name. Return the ids of the model and of the jobs."""
    with api.service.database.write() as session:
        model_id = some_model(session, api.tenant_id)
        corpus = inputs.add_corpus(
            session,
            tenant_id=api.tenant_id,
            name="stories",
            source=FileCorpus(kind="file", path="stories.jsonl"),
            size_bytes=9,
        )
        jobs = [
            queue.submit(
                session,
                NewJob(
                    tenant_id=api.tenant_id,
                    kind=JobKind.MASK,
                    payload={"model_id": model_id, "corpus_id": corpus.id, "density": density},
                ),
            ).id
            for density in (0.001, 0.002)
        ]
    return model_id, jobs


def test_jobs_are_found_by_kind_state_model_release_and_alias(api: Api) -> None:
    model_id, _ = add_masks(api)
    api.publish(api.package(), name="tiny")
    api.publish(api.package(seed=1), name="other", alias="canary")
    with api.service.database.write() as session:
        payload = {"run_id": "x"}
        queue.submit(session, NewJob(tenant_id=api.tenant_id, kind=JobKind.REPLAY, payload=payload))
    client = signed_in(api)
    for query, expected in {
        "": ["Replay", "Package of tiny", "Package of tiny", "Mask of tiny", "Mask of tiny"],
        "?kind=mask&state=&model_id=": ["Mask of tiny", "Mask of tiny"],
        "?state=succeeded": ["Package of tiny", "Package of tiny"],
        f"?model_id={model_id}&kind=package": ["Package of tiny", "Package of tiny"],
        "?release=tiny": ["Package of tiny"],
        "?alias=canary": ["Package of tiny"],
        "?release=tiny&alias=canary": [],
        "?model_id=model_none": [],
    }.items():
        found = rows_of(client.get(f"/ui/jobs{query}"))
        assert [row.rpartition(" queued")[0] or row.partition(" succeeded")[0] for row in found] == expected
    assert "other 1" in rows_of(client.get("/ui/jobs?alias=canary"))[0]
    first = client.get("/ui/jobs?kind=mask&limit=1")
    older = re.search(r'href="(\?[^"]+)">Older', first.text)
    assert older is not None
    assert "kind=mask" in older[1]
    assert len(rows_of(client.get("/ui/jobs" + unescape(older[1])))) == 1
    assert '<option value="mask" selected>' in first.text
    assert client.get("/ui/jobs?kind=none").status_code == 422


def test_a_link_with_filters_is_followed_after_signing_in(api: Api) -> None:
    client = TestClient(api.client.app, base_url=URL, follow_redirects=False)
    asked = client.get("/ui/jobs?kind=mask&state=failed").headers["location"]
    shown = client.get(asked).text
    to = re.search(r'name="next" value="([^"]+)"', shown)
    assert to is not None
    answer = client.post("/ui/sign-in", data={"token": api.token, "next": unescape(to[1])}, headers=OWN)
    assert answer.headers["location"] == "/ui/jobs?kind=mask&state=failed"


def test_two_jobs_are_chosen_by_links_and_shown_side_by_side(api: Api) -> None:
    _, (one, other) = add_masks(api)
    client = signed_in(api)
    listed = client.get(f"/ui/jobs?kind=mask&against={one}").text
    link = re.search(r'href="(/ui/compare/jobs[^"]+)"', listed)
    assert link is not None
    side = rows_of(client.get(unescape(link[1])))
    assert "density 0.001 0.002" in side
    assert "corpus id stories stories" in side
    assert client.get(f"/ui/compare/jobs?a={one}").status_code == 422
    elsewhere = signed_in(api, api.operator(Role.ADMIN, tenant="acme"))
    assert elsewhere.get(f"/ui/compare/jobs?a={one}&b={other}").status_code == 404


def test_two_packages_are_shown_with_what_devices_make_of_them(api: Api) -> None:
    one, other = api.package(), api.package(seed=1)
    api.publish(one)
    client = signed_in(api)
    listed = client.get(f"/ui/packages?against={one.digest}").text
    assert f"b={other.digest.replace(':', '%3A')}" in listed
    side = rows_of(client.get(f"/ui/compare/packages?a={one.digest}&b={other.digest}"))
    assert "released as tiny 1 –" in side
    assert "devices that reported 0 –" in side
    watcher = signed_in(api, api.operator(Role.WATCHER))
    assert watcher.get(f"/ui/compare/packages?a={one.digest}&b={other.digest}").status_code == 403


def test_the_audit_log_is_for_administrators_and_has_names_and_filters(api: Api) -> None:
    package = api.package()
    with api.service.database.write() as session:
        _, secret = access.create_token(session, tenant_id=api.tenant_id, name="robot", role=Role.OPERATOR)
    for token in (api.token, secret):
        body = {"name": "tiny", "package_digest": package.digest, "alias": "stable"}
        assert api.post("/v1/releases", body, token).status_code == 201
    api.post("/v1/invitations", {"release": "tiny"}, secret)
    client = signed_in(api)
    found = rows_of(client.get("/ui/audit"))
    assert [row.split(" ago ")[1].split(" /v1")[0] for row in found] == [
        "robot create invitation",
        "robot create release",
        "first create release",
    ]
    assert "package_digest tiny 2, tiny 1" in found[1]
    assert '<a href="/ui/releases/tiny">' in client.get("/ui/audit").text
    with api.service.database.read() as session:
        robot = session.query(tables.OperatorToken).filter_by(name="robot").one().id
    for query, numbers in {
        "?action=create_release&token_id=&subject=": ["2", "1"],
        f"?token_id={robot}": ["3", "2"],
        "?subject=/versions/2": ["2"],
        "?subject=%25": [],
        "?cursor=2": ["1"],
    }.items():
        assert [row.split()[0] for row in rows_of(client.get(f"/ui/audit{query}"))] == numbers, query
    operator = signed_in(api, secret)
    assert operator.get("/ui/audit").status_code == 403
    assert "/ui/audit" not in operator.get("/ui/jobs").text
    elsewhere = signed_in(api, api.operator(Role.ADMIN, tenant="acme"))
    assert rows_of(elsewhere.get("/ui/audit")) == []


def add_runs(api: Api) -> list[str]:
    """Report an adopted run and a kept one of a device, and one on version 2 of another. Return the ids."""
    first, second = api.device(), api.device()
    kept = {"outcome": "kept_base", "steps": 77}
    told: list[tuple[TestDevice, dict[str, Any]]] = [(first, {}), (first, kept), (second, {"version": 2})]
    ids = [new_run_id() for _ in told]
    for run_id, (device, changes) in zip(ids, told, strict=True):
        body = {"run_id": run_id, "metrics": run_metrics(**changes)}
        assert api.post("/v1/runs", body, device.token()).status_code == 201
    return ids


def test_runs_are_found_by_release_version_outcome_and_device(api: Api) -> None:
    api.publish(api.package())
    adopted, kept, other = add_runs(api)
    client = signed_in(api)
    assert len(rows_of(client.get("/ui/runs"))) == 3
    device = api.get(f"/v1/runs/{other}").json()["device_id"]
    release = api.get(f"/v1/runs/{other}").json()["metrics"]["release"]
    for query, expected in (
        ("outcome=kept_base", {kept}),
        ("version=2", {other}),
        (f"release={release}&version=1", {adopted, kept}),
        (f"device_id={device}", {other}),
        ("release=unknown", set()),
    ):
        answer = client.get(f"/ui/runs?{query}")
        assert set(re.findall(r'href="/ui/runs/([0-9a-f-]{36})"', answer.text)) == expected, query
        listed = api.get(f"/v1/runs?{query}").json()["items"]
        assert {one["run_id"] for one in listed} == expected, query
    assert client.get("/ui/runs?version=two").status_code == 422
    assert api.get("/v1/runs?outcome=well").status_code == 422


def test_two_runs_are_chosen_by_links_and_shown_side_by_side(api: Api) -> None:
    api.publish(api.package())
    first, second, _ = add_runs(api)
    client = signed_in(api)
    assert "steps 100" in " ".join(
        unescape(re.sub(r"<[^>]+>", " ", client.get(f"/ui/runs/{first}").text)).split()
    )
    chosen = client.get(f"/ui/runs?against={first}")
    assert f"/ui/compare/runs?a={first}&amp;b={second}" in chosen.text
    lines = rows_of(client.get(f"/ui/compare/runs?a={first}&b={second}"))
    assert "steps 100 77" in lines and "outcome adopted kept_base" in lines
    stranger = signed_in(api, api.operator(Role.ADMIN, tenant="acme"))
    assert rows_of(stranger.get("/ui/runs")) == []
    for path in (f"/ui/runs/{first}", f"/ui/compare/runs?a={first}&b={second}"):
        assert stranger.get(path).status_code == 404
    assert client.get("/ui/runs/not-a-run").status_code == 404
