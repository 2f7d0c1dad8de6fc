"""Rollouts over the API: groups, waves that open and stop by themselves, signed offers, access."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from tuf.api.metadata import Snapshot, Targets, Timestamp

from permille.schemas.access import Role
from permille.trust.metadata import parse
from permille.trust.repository import Repository
from permille.trust.roles import aliases_of, target_path
from permille_rollouts.offer import Offer, RolloutState, place_of
from permille_rollouts.store import rollouts
from permille_service.trust import repositories
from tests.api_service import Api, TestDevice, new_run_id, run_metrics, running_api

RULES = {"waves": ["50%", "100%"], "min_reports": 2, "soak_s": 60, "deadline_s": 3600}


@pytest.fixture
def moments() -> list[datetime]:
    return [datetime(2030, 1, 1, tzinfo=UTC)]


@pytest.fixture
def api(tmp_path: Path, moments: list[datetime]) -> Iterator[Api]:
    with running_api(
        tmp_path, clock=lambda: moments[0], sign_ins_per_minute=10_000, metrics_token="scraper"
    ) as made:
        made.publish(made.package())
        body = {"name": "tiny", "package_digest": made.package(seed=1).digest}
        assert made.post("/v1/releases", body).status_code == 201
        yield made


def start(api: Api, **changes: Any) -> dict[str, Any]:
    answer = api.post("/v1/rollouts", {"release": "tiny", "rules": RULES, **changes})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def signed(api: Api, token: str) -> Offer | None:
    """Read the offer for `tiny` and `stable` from the newest signed metadata, as a device does."""

    def file(name: str) -> bytes:
        content: bytes = api.get(f"/v1/trust/metadata/{name}.json", token).content
        return content

    stamp = parse(Timestamp, file("timestamp")).signed
    snapshot = parse(Snapshot, file(f"{stamp.snapshot_meta.version}.snapshot")).signed
    version = snapshot.meta["rollouts.json"].version
    target = parse(Targets, file(f"{version}.rollouts")).signed.targets.get("rollouts/tiny/stable.json")
    return None if target is None else Offer.parse(target.custom)


def report(api: Api, rollout: str, token: str, **body: Any) -> int:
    status: int = api.put(f"/v1/device/rollouts/{rollout}/report", body, token).status_code
    return status


def fleet(api: Api, count: int = 12) -> list[tuple[TestDevice, str]]:
    return [(device, device.token()) for device in (api.device() for _ in range(count))]


def in_wave(rollout: str, found: list[tuple[TestDevice, str]], percent: int) -> list[str]:
    return [token for device, token in found if place_of(rollout, device.id) < 100 * percent]


def sweep(api: Api, moments: list[datetime], seconds: float = 61) -> None:
    moments[0] += timedelta(seconds=seconds)
    rollouts.sweep(api.service.database)


def show(api: Api, rollout: str) -> dict[str, Any]:
    found: dict[str, Any] = api.get(f"/v1/rollouts/{rollout}").json()
    return found


def test_a_good_version_reaches_all_devices(api: Api, moments: list[datetime]) -> None:
    devices = fleet(api)
    made = start(api)
    assert (made["state"], made["wave"], made["version"], made["before"]) == ("running", 1, 2, 1)
    first = in_wave(made["id"], devices, 50)
    offer = signed(api, devices[0][1])
    assert offer is not None
    assert (offer.version, offer.places, offer.state) == (2, 5000, RolloutState.RUNNING)
    assert made["wave_devices"] == len(first)
    for token in first:
        assert report(api, made["id"], token) == 204
        assert report(api, made["id"], token, installed=True, code="ok", worse=False, difference=-0.01) == 204
    sweep(api, moments, 30)
    assert show(api, made["id"])["wave"] == 1, "the soak time is not over"
    sweep(api, moments)
    assert show(api, made["id"])["wave"] == 2
    offer = signed(api, devices[0][1])
    assert offer is not None and offer.places == 10_000
    for _, token in devices:
        report(api, made["id"], token, installed=True, code="ok")
    sweep(api, moments)
    assert show(api, made["id"])["state"] == "done"
    assert signed(api, devices[0][1]) is None
    assert api.get("/v1/releases/tiny/aliases/stable").json()["version"] == 2
    funnel = show(api, made["id"])["funnel"]
    assert sum(wave["installed"] for wave in funnel) == len(devices)


def test_the_next_rollout_begins_after_the_end_of_the_one_before(api: Api, moments: list[datetime]) -> None:
    """This also holds if no device has polled since that end, so that the end is not signed yet."""
    _, token = fleet(api, 1)[0]
    first = start(api, rules={**RULES, "waves": ["100%"], "soak_s": 0})
    report(api, first["id"], token, installed=True, code="ok")
    sweep(api, moments, 1)
    assert show(api, first["id"])["state"] == "done"
    api.post("/v1/releases", {"name": "tiny", "package_digest": api.package(seed=2).digest})
    second = start(api)
    assert (second["version"], second["before"]) == (3, 2), "the alias has moved"
    offer = signed(api, token)
    assert offer is not None and offer.rollout == second["id"]


def test_a_rollout_is_not_reverted_under_a_later_one(api: Api) -> None:
    _, token = fleet(api, 1)[0]
    first = start(api)
    api.post(f"/v1/rollouts/{first['id']}/stop")
    second = start(api)
    assert api.post(f"/v1/rollouts/{first['id']}/revert").status_code == 409
    api.post(f"/v1/rollouts/{second['id']}/stop")
    assert api.post(f"/v1/rollouts/{first['id']}/revert").json()["state"] == "reverted"
    offer = signed(api, token)
    assert offer is not None and offer.rollout == second["id"], "who has its version keeps it"


def test_a_rollout_that_cannot_be_signed_stays_as_it_was_and_stops_no_other(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for alias in ("a", "b"):
        assert api.put(f"/v1/releases/tiny/aliases/{alias}", {"version": 1}).status_code == 200
    token = api.device().token()
    unknown, broken, good = start(api, alias="a"), start(api, alias="b"), start(api)
    with api.service.database.write() as session:
        for one, state in ((unknown, "foo"), (broken, "done"), (good, "paused")):
            changed = "UPDATE rollouts SET state = :state, signed_revision = 0 WHERE id = :id"
            session.execute(text(changed), {"state": state, "id": one["id"]})
    published = Repository.move_alias

    def fail(repository: Repository, *arguments: Any) -> None:
        published(repository, *arguments)
        raise LookupError("a bug")

    monkeypatch.setattr(Repository, "move_alias", fail)
    offer = signed(api, token)
    assert offer is not None and offer.state is RolloutState.PAUSED
    for one in (unknown, broken):
        assert f"the newest change of {one['id']} cannot be signed" in caplog.text
    assert api.get("/v1/releases/tiny/aliases/b").json()["version"] == 1
    target = repositories.read(api.service, api.tenant_id).target(target_path("tiny", 2))
    assert target is not None and "b" not in aliases_of(target)


def test_a_damaged_rollout_or_group_does_not_hide_the_others(api: Api) -> None:
    for name in ("first", "second"):
        assert api.post("/v1/groups", {"name": name}).status_code == 201
        api.post(f"/v1/rollouts/{start(api)['id']}/stop")
    with api.service.database.write() as session:
        session.execute(text("UPDATE rollouts SET state = 'foo' WHERE id = (SELECT min(id) FROM rollouts)"))
        session.execute(text("""UPDATE device_groups SET rule = '{"foo": 1}' WHERE name = 'first'"""))
    assert [one["state"] for one in api.get("/v1/rollouts").json()["items"]] == ["stopped"]
    assert [one["name"] for one in api.get("/v1/groups").json()["items"]] == ["second"]


@pytest.mark.parametrize("end", ["done", "reverted"])
def test_an_alias_that_an_operator_moved_meanwhile_stays_there(
    api: Api, moments: list[datetime], end: str
) -> None:
    _, token = fleet(api, 1)[0]
    made = start(api, rules={**RULES, "waves": ["100%"], "soak_s": 0})
    api.post("/v1/releases", {"name": "tiny", "package_digest": api.package(seed=2).digest})
    assert api.put("/v1/releases/tiny/aliases/stable", {"version": 3}).status_code == 200
    if end == "done":
        report(api, made["id"], token, installed=True, code="ok")
        sweep(api, moments, 1)
    else:
        api.post(f"/v1/rollouts/{made['id']}/revert")
    assert signed(api, token) is None
    assert show(api, made["id"])["state"] == end
    assert api.get("/v1/releases/tiny/aliases/stable").json()["version"] == 3


def test_a_revert_brings_no_yanked_version_back(api: Api) -> None:
    made = start(api)
    api.post("/v1/releases/tiny/versions/1/yank", {})
    assert api.post(f"/v1/rollouts/{made['id']}/revert").json()["state"] == "reverted"
    assert [one["version"] for one in api.get("/v1/releases").json()["items"]] == [2, 1]


def test_a_lost_manifest_stops_a_revert_but_no_device(api: Api, moments: list[datetime]) -> None:
    devices = fleet(api, 80)
    made = start(api, on_stop="revert")
    for token in in_wave(made["id"], devices, 50):
        report(api, made["id"], token, installed=True, code="ok", worse=True, difference=0.05)
    sweep(api, moments, 1)
    assert show(api, made["id"])["state"] == "stopped"
    api.service.blobs.delete(api.get("/v1/releases/tiny/versions/1").json()["manifest_digest"])
    assert signed(api, devices[0][1]) is None
    assert show(api, made["id"])["state"] == "reverted"
    assert api.get("/v1/releases/tiny/aliases/stable").json()["version"] == 1


def test_only_an_open_wave_may_begin(api: Api) -> None:
    devices = fleet(api)
    made = start(api)
    first = in_wave(made["id"], devices, 50)
    for _, token in devices:
        assert report(api, made["id"], token) == (204 if token in first else 409)
    assert sum(wave["offered"] for wave in show(api, made["id"])["funnel"]) == len(first)


def test_four_damaged_packages_stop_it_at_once_and_resume_counts_anew(
    api: Api, moments: list[datetime]
) -> None:
    devices = fleet(api, 30)
    made = start(api)
    first = in_wave(made["id"], devices, 50)
    for token in first[:4]:
        report(api, made["id"], token, code="integrity", damage="blob-digest")
        report(api, made["id"], token, code="integrity", damage="blob-digest")
    sweep(api, moments, 1)
    found = show(api, made["id"])
    assert (found["state"], found["reason"]) == ("paused", "integrity")
    assert found["numbers"]["devices"] == 4, "a report that is sent twice counts once"
    offer = signed(api, devices[0][1])
    assert offer is not None and offer.state is RolloutState.PAUSED
    assert report(api, made["id"], first[5]) == 409
    entry = api.get("/v1/audit", params={"after": 0, "limit": 200}).json()[-1]
    assert (entry["action"], entry["request"]["reason"]) == ("halt_rollout", "integrity")
    resumed = api.post(f"/v1/rollouts/{made['id']}/resume").json()
    assert (resumed["state"], resumed["reason"]) == ("running", None)
    sweep(api, moments, 1)
    assert show(api, made["id"])["state"] == "running", "failures of before are acknowledged"
    for token in first[4:]:
        report(api, made["id"], token, installed=True, code="ok")
    sweep(api, moments)
    assert show(api, made["id"])["wave"] == 2


def test_who_began_and_stays_silent_is_a_failure(api: Api, moments: list[datetime]) -> None:
    devices = fleet(api)
    made = start(api)
    first = in_wave(made["id"], devices, 50)
    for token in first:
        report(api, made["id"], token)
    for token in first[1:]:
        report(api, made["id"], token, installed=True, code="ok")
    sweep(api, moments)
    assert show(api, made["id"])["wave"] == 1, "one device has not ended: it counts against the wave"
    sweep(api, moments, 3600)
    found = show(api, made["id"])
    assert (found["state"], found["reason"]) == ("paused", "success")
    assert found["funnel"][0]["silent"] == 1
    late = next(device for device, token in devices if token == first[0])
    assert report(api, made["id"], late.token(), installed=True, code="ok") == 204
    assert show(api, made["id"])["funnel"][0]["silent"] == 0, "it came back"


def test_a_wave_that_nobody_answers_pauses(api: Api, moments: list[datetime]) -> None:
    fleet(api)
    made = start(api)
    sweep(api, moments, 3600 + 61)
    assert (show(api, made["id"])["state"], show(api, made["id"])["reason"]) == ("paused", "silence")


def test_worse_models_stop_it_and_revert_is_a_new_version(api: Api, moments: list[datetime]) -> None:
    devices = fleet(api, 80)
    made = start(api, on_stop="revert")
    first = in_wave(made["id"], devices, 50)
    assert len(first) >= 20, "the hash chooses so few in one of a million runs"
    for token in first:
        report(api, made["id"], token, installed=True, code="ok", worse=True, difference=0.05)
    sweep(api, moments, 1)
    found = show(api, made["id"])
    assert (found["state"], found["reason"]) == ("stopped", "worse")
    assert signed(api, devices[0][1]) is None, "the device that asks first has it signed"
    assert show(api, made["id"])["state"] == "reverted"
    meant = api.get("/v1/releases/tiny/aliases/stable").json()
    assert meant["version"] == 3
    versions = api.get("/v1/releases").json()["items"]
    assert versions[0]["manifest_digest"] == versions[2]["manifest_digest"]


def test_a_rise_of_the_general_loss_stops_it(api: Api, moments: list[datetime]) -> None:
    devices = fleet(api, 24)
    made = start(api, rules={**RULES, "waves": ["100%"]})
    for number, (_, token) in enumerate(devices):
        assert report(api, made["id"], token, installed=True, code="ok") == 204
        for version, loss in ((1, 3.01), (2, 3.08 + number / 1000)):
            metrics = run_metrics(
                release="tiny", version=version, general_loss_base=3.0, general_loss_personal=loss
            )
            answer = api.post("/v1/runs", {"run_id": new_run_id(), "metrics": metrics}, token)
            assert answer.status_code == 201, answer.text
    sweep(api, moments, 1)
    found = show(api, made["id"])
    assert (found["state"], found["reason"]) == ("paused", "general")
    assert found["numbers"]["of"] == len(devices)
    assert found["numbers"]["mean"] == pytest.approx(0.0815)


def test_a_wave_opens_when_it_is_approved_and_no_request_approves_two(
    api: Api, moments: list[datetime]
) -> None:
    devices = fleet(api)
    made = start(api, rules={**RULES, "approval": True})
    path = f"/v1/rollouts/{made['id']}"
    for token in in_wave(made["id"], devices, 50):
        report(api, made["id"], token, installed=True, code="ok")
    sweep(api, moments)
    found = show(api, made["id"])
    assert (found["wave"], found["awaits_approval"]) == (1, True)
    assert api.post(f"{path}/pause").json()["awaits_approval"] is False
    api.post(f"{path}/resume")
    for wave, status in ((1, 422), (3, 409), (2, 200), (2, 200)):
        assert api.post(f"{path}/approve", {"wave": wave}).status_code == status
    sweep(api, moments, 1)
    found = show(api, made["id"])
    assert (found["wave"], found["awaits_approval"]) == (2, False)
    entry = api.get("/v1/audit", params={"after": 0, "limit": 200}).json()[-1]
    assert (entry["action"], entry["request"]) == ("approve_rollout", {"wave": 2})


def test_a_rollout_without_approval_refuses_one(api: Api) -> None:
    fleet(api, 1)
    made = start(api)
    answer = api.post(f"/v1/rollouts/{made['id']}/approve", {"wave": 2})
    assert (answer.status_code, "needs no approval" in answer.text) == (409, True)


def test_operators_pause_resume_stop_and_revert(api: Api) -> None:
    device, token = fleet(api, 1)[0]
    made = start(api, draft=True)
    assert made["state"] == "draft" and signed(api, token) is None
    path = f"/v1/rollouts/{made['id']}"
    assert api.post(f"{path}/pause").status_code == 409
    assert api.post(f"{path}/revert").status_code == 409
    assert api.post(f"{path}/resume").json()["state"] == "running"
    assert api.post(f"{path}/pause").json()["state"] == "paused"
    offer = signed(api, token)
    assert offer is not None and offer.state is RolloutState.PAUSED
    assert api.post("/v1/rollouts", {"release": "tiny"}).status_code == 409, "one at a time"
    assert api.post(f"{path}/stop").json()["state"] == "stopped"
    assert api.post(f"{path}/resume").status_code == 409
    assert api.post(f"{path}/revert").json()["state"] == "reverted"
    assert api.post(f"{path}/revert").status_code == 409
    assert device.id


def test_a_draft_may_be_stopped_and_is_signed_nowhere(api: Api) -> None:
    _, token = fleet(api, 1)[0]
    made = start(api, draft=True)
    assert api.post(f"/v1/rollouts/{made['id']}/stop").json()["state"] == "stopped"
    assert signed(api, token) is None
    assert api.post(f"/v1/rollouts/{made['id']}/revert").status_code == 409, "no device has its version"
    assert start(api)["state"] == "running", "the next one may begin"


def test_what_cannot_be_rolled_out_is_refused(api: Api) -> None:
    refused: dict[int, dict[str, Any]] = {
        409: {"version": 1},
        404: {"version": 9},
        422: {"rules": {"waves": ["10%", "5%", "100%"]}},
    }
    for status, body in refused.items():
        answer = api.post("/v1/rollouts", {"release": "tiny", **body})
        assert answer.status_code == status, answer.text
    assert api.post("/v1/rollouts", {"release": "tiny", "rules": {"waves": ["5%", "50%"]}}).status_code == 422
    assert api.post("/v1/rollouts", {"release": "tiny", "alias": "canary"}).status_code == 404
    api.post("/v1/releases/tiny/versions/2/yank", {})
    assert api.post("/v1/rollouts", {"release": "tiny", "version": 2}).status_code == 409


def test_a_yanked_version_stops_its_rollout(api: Api, moments: list[datetime]) -> None:
    fleet(api, 1)
    made = start(api)
    api.post("/v1/releases/tiny/versions/2/yank", {})
    sweep(api, moments, 1)
    assert (show(api, made["id"])["state"], show(api, made["id"])["reason"]) == ("stopped", "yanked")


def test_groups_choose_by_name_tag_and_what_devices_tell(api: Api) -> None:
    (one, token), (two, _) = fleet(api, 2)
    facts = {"agent_version": "0.2.0", "engine": "light", "memory_bytes": 8 << 30, "tags": ["kitchen"]}
    assert api.put("/v1/device/facts", facts, token).status_code == 204
    assert api.put(f"/v1/devices/{two.id}/tags", {"tags": ["canary", "eu"]}).json()["tags"] == [
        "canary",
        "eu",
    ]
    rules: dict[str, tuple[dict[str, Any], int]] = {
        "all": ({}, 2),
        "named": ({"devices": [one.id]}, 1),
        "tagged": ({"tags": ["canary", "us"]}, 1),
        "tagged-by-owner": ({"tags": ["kitchen"]}, 1),
        "new": ({"agent_version": "0.1.9"}, 1),
        "large": ({"memory_bytes": 4 << 30, "engines": ["light"]}, 1),
        "nobody": ({"engines": ["torch"]}, 0),
    }
    for name, (rule, count) in rules.items():
        made = api.post("/v1/groups", {"name": name, "rule": rule})
        assert (made.status_code, made.json()["devices"]) == (201, count), name
    again = api.post("/v1/groups", {"name": "all"})
    assert (again.status_code, "`permille groups delete all`" in again.text) == (409, True)
    assert api.post("/v1/groups", {"name": "x", "rule": {"devices": ["dev_" + "0" * 26]}}).status_code == 404
    tagged = next(one for one in api.get("/v1/groups").json()["items"] if one["name"] == "tagged")
    made = start(api, group_id=tagged["id"], rules={**RULES, "waves": ["100%"]})
    assert made["wave_devices"] == 1
    offer = signed(api, token)
    assert offer is not None and offer.choice.members is not None and len(offer.choice.members) == 1
    assert api.delete(f"/v1/groups/{tagged['id']}").status_code == 409
    named = next(one for one in api.get("/v1/groups").json()["items"] if one["name"] == "named")
    assert api.delete(f"/v1/groups/{named['id']}").status_code == 204


def test_a_tenant_sees_no_group_or_rollout_of_another(api: Api) -> None:
    other = api.operator(Role.ADMIN, tenant="other")
    (device, _) = fleet(api, 1)[0]
    group = api.post("/v1/groups", {"name": "all"}).json()
    made = start(api, group_id=group["id"])
    for path in (f"/v1/groups/{group['id']}", f"/v1/rollouts/{made['id']}"):
        assert api.get(path, other).status_code == 404
    assert api.get("/v1/groups", other).json()["items"] == []
    assert api.get("/v1/rollouts", other).json()["items"] == []
    for action in ("pause", "resume", "stop", "revert"):
        assert api.post(f"/v1/rollouts/{made['id']}/{action}", None, other).status_code == 404
    assert api.delete(f"/v1/groups/{group['id']}", other).status_code == 404
    assert api.put(f"/v1/devices/{device.id}/tags", {"tags": []}, other).status_code == 404
    assert api.post("/v1/rollouts", {"release": "tiny"}, other).status_code == 404
    assert api.post("/v1/groups", {"name": "g", "rule": {"devices": [device.id]}}, other).status_code == 404


def test_a_device_of_another_alias_cannot_report(api: Api) -> None:
    made = start(api, rules={**RULES, "waves": ["100%"]})
    api.put("/v1/releases/tiny/aliases/canary", {"version": 1})
    assert report(api, made["id"], api.device(alias="canary").token()) == 404
    assert report(api, made["id"], api.device().token(), code="silent") == 422
    assert report(api, made["id"], api.device().token(), code="ok", difference=0.3) == 422


def test_a_poll_of_a_device_takes_three_statements_at_most(api: Api) -> None:
    token = api.device().token()
    start(api)
    api.get("/v1/trust/metadata/timestamp.json", token)
    # These are the caller, the file with the state of rollouts, and the time when the device was seen.
    assert api.statements("/v1/trust/metadata/timestamp.json", token) <= 3


def halted(api: Api, moments: list[datetime]) -> str:
    """Return the id of a rollout that was halted by damaged packages."""
    devices = fleet(api, 30)
    rollout: str = start(api)["id"]
    for token in in_wave(rollout, devices, 50)[:4]:
        report(api, rollout, token, code="integrity", damage="blob-digest")
    sweep(api, moments, 1)
    return rollout


def test_metrics_count_rollouts_by_state_and_those_that_halted(api: Api, moments: list[datetime]) -> None:
    halted(api, moments)
    figures = api.client.get("/metrics", headers=api.auth("scraper")).text
    assert 'permille_rollouts{state="paused"} 1.0' in figures
    assert "permille_rollouts_halted 1.0" in figures


def test_webhooks_are_made_listed_told_and_removed(api: Api) -> None:
    made = api.post("/v1/webhooks", {"url": "https://hooks.example.org/in"}).json()
    assert made["secret"].startswith("whsec_")
    listed = api.get("/v1/webhooks").json()["items"]
    assert listed == [{name: value for name, value in made.items() if name != "secret"}]
    assert made["secret"] not in str(api.get("/v1/audit?limit=200").json())
    rollout = start(api, rules={**RULES, "waves": ["100%"], "soak_s": 0})
    api.post(f"/v1/rollouts/{rollout['id']}/stop")
    path = f"/v1/webhooks/{made['id']}"
    [delivery] = api.get(f"{path}/deliveries").json()["items"]
    assert (delivery["event"], delivery["attempts"], delivery["failure"]) == ("rollout.stopped", 0, None)
    watcher, stranger = api.operator(Role.VIEWER), api.operator(Role.ADMIN, tenant="acme")
    assert api.post("/v1/webhooks", {"url": "https://hooks.example.org/"}, watcher).status_code == 403
    assert api.delete(path, watcher).status_code == 403
    assert api.delete(path, stranger).status_code == 404
    assert api.get(f"{path}/deliveries", stranger).status_code == 404
    assert api.get("/v1/webhooks", stranger).json()["items"] == []
    for url in ("ftp://hooks.example.org/", "https://user:word@hooks.example.org/", "hooks.example.org", ""):
        assert api.post("/v1/webhooks", {"url": url}).status_code == 422, url
    assert api.delete(path).status_code == 204
    assert api.get("/v1/webhooks").json()["items"] == []


def test_a_maintenance_window_is_signed_with_the_rollout(api: Api) -> None:
    window = {"cron": "0 2 * * 1-5", "minutes": 90, "zone": "Europe/Berlin"}
    made = start(api, window=window)
    assert made["window"] == window
    [(_, token)] = fleet(api, 1)
    offer = signed(api, token)
    assert offer is not None and offer.window is not None
    assert (offer.window.cron, offer.window.minutes, offer.window.zone) == tuple(window.values())
    wrongs: list[dict[str, Any]] = [{"cron": cron} for cron in ("0 2 * *", "0 25 * * *", "0/15 2 * * *")]
    for wrong in (*wrongs, {"zone": "Mars/Olympus"}, {"minutes": 0}):
        answer = api.post("/v1/rollouts", {"release": "tiny", "window": {**window, **wrong}})
        assert answer.status_code == 422, wrong
