"""Attacks on the pages below `/ui`: who has access, from which sites, and where redirects lead."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from permille.schemas.access import Role
from permille.schemas.jobs import JobKind
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from tests.api_service import URL, Api, running_api

OWN = {"Sec-Fetch-Site": "same-origin"}
COOKIE = "permille_session"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path, sign_ins_per_minute=5) as running:
        yield running


def browser(api: Api) -> TestClient:
    """Return a client with its own cookies that does not follow redirects."""
    return TestClient(api.client.app, base_url=URL, raise_server_exceptions=False, follow_redirects=False)


def signed_in(api: Api, token: str | None = None, to: str = "") -> tuple[TestClient, Any]:
    client = browser(api)
    form = {"token": api.token if token is None else token, "next": to}
    return client, client.post("/ui/sign-in", data=form, headers=OWN)


def some_job(api: Api) -> str:
    with api.service.database.write() as session:
        new = NewJob(tenant_id=api.tenant_id, kind=JobKind.MASK, payload={"model_id": "m"})
        return queue.submit(session, new).id


@pytest.mark.attack(14, "views without a cookie, or with one that was made up, cut, or of a revoked token")
def test_nobody_sees_anything_without_a_token_that_is_good_now(api: Api) -> None:
    for path in ("/ui", "/ui/", "/ui/jobs", "/ui/fleet", "/ui/releases/tiny", "/ui/masks"):
        answer = browser(api).get(path)
        assert (answer.status_code, answer.headers["location"][:11]) == (303, "/ui/sign-in"), path
    token = api.operator(Role.VIEWER)
    client, _ = signed_in(api, token)
    assert client.get("/ui/jobs").status_code == 200
    cookie = client.cookies[COOKIE]
    for made_up in (cookie[:-8], "A" * 2000, api.token, "", cookie[4:] + cookie[:4]):
        assert browser(api).get("/ui/jobs", headers={"Cookie": f"{COOKIE}={made_up}"}).status_code == 303
    listed = api.get("/v1/tokens").json()["items"]
    viewer = next(one["id"] for one in listed if one["role"] == "viewer")
    assert api.delete(f"/v1/tokens/{viewer}").status_code == 204
    assert client.get("/ui/jobs").status_code == 303
    assert client.get("/ui/jobs", headers={"HX-Request": "true"}).headers["HX-Redirect"] == "/ui/sign-in"


@pytest.mark.attack(14, "a script reads the session, or a list of visited addresses holds the token")
def test_the_token_is_in_no_address_no_page_and_no_scripts_reach(api: Api) -> None:
    client, answer = signed_in(api, to="/ui/fleet")
    flags = answer.headers["set-cookie"].lower()
    assert all(flag in flags for flag in ("httponly", "samesite=strict", "path=/ui", "max-age=43200"))
    assert answer.headers["location"] == "/ui/fleet"
    shown = client.get("/ui/jobs")
    assert api.token not in shown.text + answer.headers["set-cookie"] + str(shown.headers)
    assert shown.headers["cache-control"] == "no-store"
    policy = shown.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert not re.search(r"\son[a-z]+=|<script>|\sstyle=|https?://", shown.text)
    assert browser(api).get(f"/ui/jobs?token={api.token}").status_code == 303
    out = client.post("/ui/sign-out", headers=OWN)
    assert 'permille_session=""' in out.headers["set-cookie"]


@pytest.mark.attack(14, "a copy of the cookie is used after its operator has signed out")
def test_signing_out_ends_the_session_wherever_its_cookie_is(api: Api) -> None:
    client, _ = signed_in(api)
    other, _ = signed_in(api)
    copied = {"Cookie": f"{COOKIE}={client.cookies[COOKIE]}"}
    assert browser(api).get("/ui/jobs", headers=copied).status_code == 200
    assert client.post("/ui/sign-out", headers=OWN).status_code == 303
    for path in ("/ui/jobs", "/ui/fleet", "/ui/masks"):
        assert browser(api).get(path, headers=copied).status_code == 303, path
    for _ in range(2):
        assert browser(api).post("/ui/sign-out", headers=OWN | copied).status_code == 303
    assert other.get("/ui/jobs").status_code == 200, "a session of its own goes on"


@pytest.mark.attack(14, "another site's page cancels a job, signs a browser in or out")
@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {},
    ],
)
def test_no_other_site_changes_anything(api: Api, headers: dict[str, str]) -> None:
    job_id, (client, _) = some_job(api), signed_in(api)
    for path in (f"/ui/jobs/{job_id}/cancel", f"/ui/jobs/{job_id}/retry", "/ui/sign-out", "/ui/sign-in"):
        answer = client.post(path, data={"token": api.token}, headers=headers)
        assert answer.status_code == 403, path
        assert "set-cookie" not in answer.headers
    assert api.get(f"/v1/jobs/{job_id}").json()["cancel_requested"] is False
    assert client.get(f"/ui/jobs/{job_id}/cancel").status_code in (404, 405)
    assert client.post(f"/ui/jobs/{job_id}/cancel", headers={"Origin": URL}).status_code == 303
    assert api.get(f"/v1/jobs/{job_id}").json()["state"] == "cancelled"
    assert api.get("/v1/audit?limit=200").json()[-1]["action"] == "cancel_job"


@pytest.mark.attack(14, "forms and headers that no browser sends, and parts of pages that have none")
def test_what_no_browser_sends_is_refused_as_such(api: Api) -> None:
    client, _ = signed_in(api)
    for path in ("fleet", "releases", "masks", "models", "packages"):
        assert client.get(f"/ui/{path}", headers={"HX-Request": "true"}).status_code == 200, path
    for origin in ("http://[", "http://[::1", "//", "127.0.0.1"):
        assert client.post("/ui/sign-out", headers={"Origin": origin}).status_code == 403, origin
    many = {f"field{i}": "x" for i in range(70)}
    assert client.post("/ui/sign-in", data=many, headers=OWN).status_code == 400
    assert client.head("/ui/jobs").headers["allow"] == "GET"
    assert client.put("/ui/sign-in").headers["allow"] == "GET, POST"


@pytest.mark.attack(14, "a small role presses a button, or looks at what it may not")
def test_the_tokens_rights_are_the_pages(api: Api) -> None:
    job_id = some_job(api)
    viewer, _ = signed_in(api, api.operator(Role.VIEWER))
    assert "Cancel" not in viewer.get(f"/ui/jobs/{job_id}").text
    refused = viewer.post(f"/ui/jobs/{job_id}/cancel", headers=OWN | {"HX-Request": "true"})
    assert (refused.status_code, refused.headers["hx-retarget"]) == (403, "#notice")
    watcher, answer = signed_in(api, api.operator(Role.WATCHER))
    assert watcher.get(answer.headers["location"]).headers["location"] == "/ui/fleet"
    assert watcher.get("/ui/fleet").status_code == 200
    assert [watcher.get(f"/ui/{path}").status_code for path in ("jobs", "releases", "models")] == [403] * 3
    other, _ = signed_in(api, api.operator(Role.ADMIN, tenant="acme"))
    assert other.get(f"/ui/jobs/{job_id}").status_code == 404
    assert other.post(f"/ui/jobs/{job_id}/cancel", headers=OWN).status_code == 404


@pytest.mark.attack(14, "tokens are guessed at the form")
def test_refused_tokens_are_counted_by_address(api: Api) -> None:
    answers = [signed_in(api, f"pmo_{i:043d}")[1].status_code for i in range(7)]
    assert answers == [401] * 5 + [429] * 2
    assert signed_in(api)[1].status_code == 303, "who has a token is held up by nobody"
    device = "pmd_" + "A" * 43
    assert signed_in(api, device)[1].status_code == 429


@pytest.mark.attack(14, "a link to the form that goes on to another site")
@pytest.mark.parametrize(
    "to",
    [
        "//evil.example/ui/",
        "https://evil.example/ui/",
        "/ui/../..//evil.example",
        "/\\evil.example",
        "/ui/jobs?//evil.example",
        "/ui/jobs?x=\r\nLocation: //evil.example",
        "x",
    ],
)
def test_signing_in_goes_on_to_this_page_alone(api: Api, to: str) -> None:
    assert signed_in(api, to=to)[1].headers["location"] == "/ui"


@pytest.mark.attack(14, "addresses with markup in them")
@pytest.mark.parametrize(
    "path", ["/ui/<script>x</script>", "/ui/jobs?state=<script>", "/ui/masks/<b>", '/ui/sign-in?next="><b>']
)
def test_no_address_is_markup_on_the_page_that_it_gets(api: Api, path: str) -> None:
    client, _ = signed_in(api)
    answer = client.get(path)
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"<script>|<b>", answer.text)
