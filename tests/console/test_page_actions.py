"""Actions on the pages below `/ui`: the forms, who may send them, and what is refused."""

import re
from html import unescape
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import text
from starlette.testclient import TestClient

from permille.schemas.access import Role
from permille_console.actions import actions
from permille_console.rendering import PageRoute
from tests.api_service import URL, Api
from tests.artifacts import some_model

OWN = {"Sec-Fetch-Site": "same-origin"}


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


def refuse_wrong_callers(api: Api, paths: list[str], digest: str) -> None:
    """Check that these actions are refused to viewers, strangers, other sites and other tenants."""
    typed = {"release": "tiny", "name": "tiny", "package_digest": digest, "step": "confirmed"}
    before = len(api.get("/v1/audit?limit=200").json())
    stranger = TestClient(api.client.app, base_url=URL, follow_redirects=False)
    viewer, admin = signed_in(api, api.operator(Role.VIEWER)), signed_in(api)
    elsewhere = signed_in(api, api.operator(Role.ADMIN, tenant="other"))
    for path in paths:
        assert viewer.get(path).status_code == viewer.post(path, data=typed, headers=OWN).status_code == 403
        for headers in ({}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
            assert admin.post(path, data=typed, headers=headers).status_code == 403, (path, headers)
        assert stranger.get(path).headers["location"].startswith("/ui/sign-in")
        assert stranger.post(path, data=typed, headers=OWN).headers["location"].startswith("/ui/sign-in")
        if path in ("/ui/new/release", "/ui/new/rollback", "/ui/new/rollout"):
            assert elsewhere.post(path, data=typed, headers=OWN).status_code in (404, 422), path
    assert len(api.get("/v1/audit?limit=200").json()) == before


@pytest.mark.attack(14, "actions by a viewer, from another site, signed out, or on another tenant's things")
def test_actions_are_refused_to_wrong_callers(api: Api) -> None:
    _, other = stock(api)
    api.post("/v1/releases", {"name": "tiny", "package_digest": other})
    refuse_wrong_callers(api, [f"/ui/new/{name}" for name in actions()], other)
    viewer, admin = signed_in(api, api.operator(Role.VIEWER)), signed_in(api)
    elsewhere = signed_in(api, api.operator(Role.ADMIN, tenant="acme"))
    assert other not in elsewhere.get("/ui/new/release").text
    for path in ("/ui/releases/tiny", "/ui/releases", "/ui/fleet", "/ui/jobs"):
        assert "/ui/new/" not in viewer.get(path).text
        assert "/ui/new/" in admin.get(path).text


def test_the_address_alone_leads_to_the_pages(api: Api) -> None:
    assert api.client.get("/", follow_redirects=False).headers["location"] == "/ui"
    assert api.client.get("/").url.path == "/ui/sign-in"


@pytest.mark.attack(14, "a route of the page that forgets to ask where a request comes from")
def test_every_post_below_ui_asks_where_it_comes_from(api: Api) -> None:
    found = iter_route_contexts(api.client.app.routes)  # type: ignore[attr-defined]
    routes = [one for one in found if (one.path or "").startswith("/ui")]
    assert len(routes) > 20
    assert all(isinstance(one.original_route, PageRoute) for one in routes)
