"""Actions on the pages below `/ui`: the forms, who may send them, and what is refused."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import text
from starlette.testclient import TestClient

from permille.schemas.access import Role
from permille_service.pages.actions import ACTIONS
from permille_service.pages.rendering import PageRoute
from tests.api_service import URL, Api, running_api
from tests.artifacts import some_model

OWN = {"Sec-Fetch-Site": "same-origin"}
MOVES = ("approve", "pause", "resume", "stop", "revert")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path) as running:
        yield running


def signed_in(api: Api, token: str | None = None) -> TestClient:
    client = TestClient(api.client.app, base_url=URL, raise_server_exceptions=False, follow_redirects=False)
    answer = client.post("/ui/sign-in", data={"token": token or api.token}, headers=OWN)
    assert answer.status_code == 303
    return client


def send(client: TestClient, path: str, step: str = "", **typed: str) -> Any:
    return client.post(path, data={**typed, "step": step}, headers=OWN)


def facts(answer: Any) -> str:
    """Return the digest of the values that a confirmation page has shown."""
    found = re.search(r'name="shown" value="([0-9a-f]{64})"', answer.text)
    assert found is not None, shown(answer)
    return found[1]


def confirm(client: TestClient, path: str, **typed: str) -> Any:
    """Send a form, and confirm what the page shows."""
    asked = client.get(path) if path.startswith("/ui/rollouts") else send(client, path, **typed)
    return send(client, path, "confirmed", shown=facts(asked), **typed)


def shown(answer: Any) -> str:
    """Return the text of a page without its markup."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.text)).split())


def stock(api: Api, devices: int = 3) -> tuple[str, str]:
    """Publish a package that some devices follow. Return its digest and that of another package."""
    first, other = api.package(), api.package(seed=1)
    api.publish(first)
    for _ in range(devices):
        api.device()
    return first.digest, other.digest


def test_a_release_is_confirmed_with_the_number_of_devices_and_published_once(api: Api) -> None:
    _, other = stock(api)
    client = signed_in(api)
    form = client.get(f"/ui/new/release?name=tiny&alias=stable&package_digest={other}")
    assert f'<option value="{other}" selected>' in form.text
    typed = {"name": "tiny", "package_digest": other, "alias": "stable", "form": "a"}
    asked = send(client, "/ui/new/release", **typed)
    assert asked.status_code == 200
    assert (
        "is in no release yet. The alias stable will point at this version. This affects 3 devices:"
        in shown(asked)
    )
    assert len(api.get("/v1/releases?name=tiny").json()["items"]) == 1, "nothing before it is confirmed"
    assert 'value="stable"' in send(client, "/ui/new/release", "edit", **typed).text
    for _ in range(2):  # a second click has no effect
        made = send(client, "/ui/new/release", "confirmed", shown=facts(asked), **typed)
        assert made.headers["location"] == "/ui/releases/tiny?version=2"
    assert [one["version"] for one in api.get("/v1/releases?name=tiny").json()["items"]] == [2, 1]
    last = api.get("/v1/audit?limit=200").json()[-1]
    assert (last["action"], last["subject"]) == ("create_release", "/v1/releases/tiny/versions/2")
    assert last["request"]["package_digest"] == other


def test_a_confirmation_holds_only_for_what_the_page_showed(api: Api) -> None:
    first, other = stock(api)
    client = signed_in(api)
    typed = {"name": "tiny", "package_digest": other, "alias": "stable"}
    asked = send(client, "/ui/new/release", **typed)
    assert send(client, "/ui/new/release", "confirmed", **typed).status_code == 200, "without what it showed"
    api.post("/v1/releases", {"name": "tiny", "package_digest": first})  # by another operator in the meantime
    late = send(client, "/ui/new/release", "confirmed", shown=facts(asked), **typed)
    assert "The effect has changed since you were asked. Nothing was done." in shown(late)
    assert "Version 3 of tiny will have a package" in shown(late)
    assert len(api.get("/v1/releases?name=tiny").json()["items"]) == 2
    made = send(client, "/ui/new/release", "confirmed", shown=facts(late), **typed)
    assert made.headers["location"] == "/ui/releases/tiny?version=3"
    with api.service.database.write() as session:  # the page stays open for two days
        session.execute(text("UPDATE idempotent_answers SET created_at = created_at - 172800000000"))
    old = send(client, "/ui/new/release", "confirmed", shown=facts(late), **typed)
    assert "Version 4 of tiny will have the package of tiny 3." in shown(old)


def test_a_moved_rollout_is_shown_again_before_it_is_moved(api: Api) -> None:
    _, other = stock(api)
    api.post("/v1/releases", {"name": "tiny", "package_digest": other})
    rollout = f"rollouts/{api.post('/v1/rollouts', {'release': 'tiny'}).json()['id']}"
    client = signed_in(api)
    asked = client.get(f"/ui/{rollout}/stop")
    api.post(f"/v1/{rollout}/pause")
    late = send(client, f"/ui/{rollout}/stop", "confirmed", shown=facts(asked))
    assert "The effect has changed since you were asked. Nothing was done." in shown(late)
    assert api.get(f"/v1/{rollout}").json()["state"] == "paused"
    assert confirm(client, f"/ui/{rollout}/stop").status_code == 303
    assert api.get(f"/v1/{rollout}").json()["state"] == "stopped"


def test_a_release_without_an_alias_needs_no_confirmation(api: Api) -> None:
    _, other = stock(api)
    made = send(signed_in(api), "/ui/new/release", name="tiny", package_digest=other)
    assert made.headers["location"] == "/ui/releases/tiny?version=2"


def test_rolling_back_publishes_the_older_package_as_a_new_version(api: Api) -> None:
    first, other = stock(api)
    api.post("/v1/releases", {"name": "tiny", "package_digest": other, "alias": "stable"})
    client = signed_in(api)
    links = re.findall(r'href="(/ui/new/rollback[^"]+)"', client.get("/ui/releases/tiny").text)
    assert {unescape(link) for link in links} == {
        f"/ui/new/rollback?name=tiny&alias=stable&package_digest={first}"
    }
    typed = {"name": "tiny", "package_digest": first, "alias": "stable"}
    assert "the package of tiny 1" in shown(send(client, "/ui/new/rollback", **typed))
    assert confirm(client, "/ui/new/rollback", **typed).status_code == 303
    newest = api.get("/v1/releases/tiny/aliases/stable").json()
    assert (newest["version"], newest["manifest_digest"]) == (3, first)


def test_a_rollout_is_started_paused_resumed_and_stopped(api: Api) -> None:
    _, other = stock(api, devices=4)
    api.post("/v1/releases", {"name": "tiny", "package_digest": other})
    client = signed_in(api)
    assert (
        "/ui/new/rollout?release=tiny&amp;version=2&amp;alias=stable" in client.get("/ui/releases/tiny").text
    )
    typed = {"release": "tiny", "version": "2", "rules_waves": "50%, 100%"}
    asked = send(client, "/ui/new/rollout", **typed)
    assert "4 devices may get tiny 2. The first wave (50% of them) opens at once" in shown(asked)
    made = confirm(client, "/ui/new/rollout", **typed).headers["location"]
    rollout = made.replace("/ui", "/v1")
    assert api.get(rollout).json()["rules"]["waves"] == ["50%", "100%"]
    for move, words, state in (
        ("pause", "starts the update to tiny 2. The update has started on 0 devices of 4 devices", "paused"),
        ("resume", "Wave 1 of 2 will be open to 50% of 4 devices", "running"),
        ("stop", "The update to tiny 2 has started on 0 devices of 4 devices", "stopped"),
    ):
        assert f"{made}/{move}" in client.get(made).text
        assert words in shown(client.get(f"{made}/{move}"))
        assert confirm(client, f"{made}/{move}").headers["location"] == made
        assert api.get(rollout).json()["state"] == state
        last = api.get("/v1/audit?limit=200").json()[-1]
        assert (last["action"], last["subject"]) == (f"{move}_rollout", f"{rollout}/{move}")
    again = confirm(client, f"{made}/pause")
    assert again.status_code == 409
    assert "The current state does not allow this" in again.text
    assert client.get(f"{made}/explode").status_code == 404
    assert "a new version, which 4 devices will install" in shown(client.get(f"{made}/revert"))


def test_a_wave_that_waits_for_an_approval_is_approved_by_its_number(api: Api) -> None:
    _, other = stock(api, devices=4)
    api.post("/v1/releases", {"name": "tiny", "package_digest": other})
    client = signed_in(api)
    typed = {"release": "tiny", "rules_waves": "50% 100%", "rules_approval": "true"}
    made = confirm(client, "/ui/new/rollout", **typed).headers["location"]
    assert "Approve wave 2" in client.get(made).text
    asked = client.get(f"{made}/approve")
    assert "Wave 2 will open to 100% of 4 devices" in shown(asked)
    assert '<input type="hidden" name="wave" value="2">' in asked.text
    assert confirm(client, f"{made}/approve").status_code == 422, "which wave is part of the request"
    assert confirm(client, f"{made}/approve", wave="2").headers["location"] == made
    last = api.get("/v1/audit?limit=200").json()[-1]
    assert (last["action"], last["request"]) == ("approve_rollout", {"wave": 2})
    assert confirm(client, f"{made}/approve", wave="3").status_code == 409


def test_an_invitation_is_shown_once_and_admits_a_device(api: Api) -> None:
    stock(api, devices=0)
    client = signed_in(api)
    made = send(client, "/ui/new/invitation", release="tiny", alias="stable")
    assert made.status_code == 200
    assert made.headers["cache-control"] == "no-store"
    found = re.search(r"permille-agent enroll (\S+) ([\w-]+\.[0-9a-f]{32})", shown(made))
    assert found is not None
    assert found[1] == URL
    listed = api.get("/v1/invitations").json()["items"]
    assert [(one["release"], one["state"]) for one in listed] == [("tiny", "open")]
    assert found[2] not in str(api.get("/v1/audit?limit=200").json())


def test_a_build_is_refused_beside_the_form_with_what_was_typed(api: Api) -> None:
    with api.service.database.write() as session:
        model_id = some_model(session, api.tenant_id)
    client = signed_in(api)
    assert f'<option value="{model_id}">tiny</option>' in client.get("/ui/new/build").text
    typed = {"model_id": model_id, "mask_method": "random", "mask_density": "0.9", "mask_seed": "one"}
    refused = send(client, "/ui/new/build", **typed)
    assert refused.status_code == 422
    assert 'value="0.9"' in refused.text and 'value="one"' in refused.text
    assert "less than or equal to 0.5" in shown(refused) and "valid integer" in shown(refused)
    assert "<details open>" in refused.text
    missing = send(client, "/ui/new/build", model_id=model_id)
    assert "Give either a mask or an adapter" in shown(missing)
    absent = send(client, "/ui/new/release", "confirmed", name="tiny", package_digest="sha256:" + "0" * 64)
    assert absent.status_code == 404
    assert 'value="tiny"' in absent.text
    hostile = send(client, "/ui/new/invitation", release='"><script>x</script>')
    assert hostile.status_code == 422
    assert "<script>x" not in hostile.text


def test_a_build_starts_as_by_the_api(api: Api) -> None:
    folder = api.service.settings.model_root / "tiny"
    folder.mkdir(parents=True)
    with api.service.database.write() as session:
        model_id = some_model(session, api.tenant_id)
    client = signed_in(api)
    made = send(client, "/ui/new/build", model_id=model_id, mask_method="random", mask_density="0.01")
    assert made.status_code == 303, shown(made)
    job = api.get(made.headers["location"].replace("/ui", "/v1")).json()
    assert (job["kind"], len(job["children"])) == ("build", 2)
    last = api.get("/v1/audit?limit=200").json()[-1]
    assert (last["action"], last["subject"]) == ("create_build", f"/v1/builds/{job['id']}")


@pytest.mark.attack(14, "actions by a viewer, from another site, signed out, or on another tenant's things")
def test_actions_are_refused_to_wrong_callers(api: Api) -> None:
    _, other = stock(api)
    api.post("/v1/releases", {"name": "tiny", "package_digest": other})
    made = api.post("/v1/rollouts", {"release": "tiny", "version": 2}).json()
    paths = [f"/ui/new/{name}" for name in ACTIONS] + [f"/ui/rollouts/{made['id']}/{move}" for move in MOVES]
    typed = {"release": "tiny", "name": "tiny", "package_digest": other, "step": "confirmed"}
    before = len(api.get("/v1/audit?limit=200").json())
    stranger = TestClient(api.client.app, base_url=URL, follow_redirects=False)
    viewer, admin = signed_in(api, api.operator(Role.VIEWER)), signed_in(api)
    elsewhere = signed_in(api, api.operator(Role.ADMIN, tenant="acme"))
    for path in paths:
        assert viewer.get(path).status_code == viewer.post(path, data=typed, headers=OWN).status_code == 403
        for headers in ({}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
            assert admin.post(path, data=typed, headers=headers).status_code == 403, (path, headers)
        assert stranger.get(path).headers["location"].startswith("/ui/sign-in")
        assert stranger.post(path, data=typed, headers=OWN).headers["location"].startswith("/ui/sign-in")
        if "rollouts" in path:
            assert elsewhere.get(path).status_code == elsewhere.post(path, headers=OWN).status_code == 404
    for name in ("release", "rollback", "rollout"):
        assert elsewhere.post(f"/ui/new/{name}", data=typed, headers=OWN).status_code in (404, 422), name
    assert other not in elsewhere.get("/ui/new/release").text
    assert len(api.get("/v1/audit?limit=200").json()) == before
    for path in ("/ui/releases/tiny", "/ui/releases", "/ui/rollouts", "/ui/fleet", "/ui/jobs"):
        assert "/ui/new/" not in viewer.get(path).text
        assert "/ui/new/" in admin.get(path).text


@pytest.mark.attack(14, "a route of the page that forgets to ask where a request comes from")
def test_every_post_below_ui_asks_where_it_comes_from(api: Api) -> None:
    found = iter_route_contexts(api.client.app.routes)  # type: ignore[attr-defined]
    routes = [one for one in found if (one.path or "").startswith("/ui")]
    assert len(routes) > 20
    assert all(isinstance(one.original_route, PageRoute) for one in routes)
