"""Actions on rollouts below `/ui`: to start, pause, resume, approve and stop one."""

import pytest

from permille.schemas.access import Role
from tests.api_service import Api
from tests.console.test_page_actions import (
    OWN,
    confirm,
    facts,
    refuse_wrong_callers,
    send,
    shown,
    signed_in,
    stock,
)

MOVES = ("approve", "pause", "resume", "stop", "revert")


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


@pytest.mark.attack(14, "actions by a viewer, from another site, signed out, or on another tenant's things")
def test_moves_are_refused_to_wrong_callers(api: Api) -> None:
    _, other = stock(api)
    api.post("/v1/releases", {"name": "tiny", "package_digest": other})
    made = api.post("/v1/rollouts", {"release": "tiny", "version": 2}).json()
    paths = [f"/ui/rollouts/{made['id']}/{move}" for move in MOVES]
    refuse_wrong_callers(api, paths, other)
    elsewhere = signed_in(api, api.operator(Role.ADMIN, tenant="acme"))
    for path in paths:
        assert elsewhere.get(path).status_code == elsewhere.post(path, headers=OWN).status_code == 404
    viewer, admin = signed_in(api, api.operator(Role.VIEWER)), signed_in(api)
    assert "/ui/new/" not in viewer.get("/ui/rollouts").text
    assert "/ui/new/" in admin.get("/ui/rollouts").text
