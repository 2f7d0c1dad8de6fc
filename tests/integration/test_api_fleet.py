"""The fleet's numbers over REST: their sources, who may see them, and reports with made-up numbers."""

from typing import Any

import pytest
from sqlalchemy import text

from permille.schemas.access import Role
from tests.api_service import Api, TestDevice, new_run_id, run_metrics


def report(api: Api, device: TestDevice, token: str, **changes: Any) -> str:
    run_id = new_run_id()
    metrics = run_metrics(**{"release": "tiny", "version": 1, **changes})
    answer = api.post("/v1/runs", {"run_id": run_id, "metrics": metrics}, token)
    assert answer.status_code == 201, answer.text
    return run_id


def version_of(api: Api, number: int = 1) -> dict[str, Any]:
    versions: list[dict[str, Any]] = api.get("/v1/fleet").json()["versions"]
    return next(one for one in versions if one["version"] == number)


def test_a_device_is_counted_by_what_it_was_told_and_its_newest_run(api: Api) -> None:
    api.publish(api.package())
    device = api.device()
    token = device.token()
    assert api.get("/v1/fleet").json()["engines"] == [{"name": "no run yet", "devices": 1}]
    assert api.get("/v1/releases/tiny/aliases/stable", token).json()["version"] == 1
    report(api, device, token, outcome="failed", loss_base=None, loss_personal=None)
    last = report(api, device, token, engine="light", agent_version="0.2.0")
    found = version_of(api)
    assert (found["devices"], found["reported"], found["aliases"]) == (1, 1, ["stable"])
    assert (found["outcomes"]["adopted"], found["outcomes"]["failed"]) == (1, 0)
    assert found["improvement"] == {"median": pytest.approx(0.2), "low": None, "high": None}
    assert found["general_rise"] is None
    fleet = api.get("/v1/fleet").json()
    assert fleet["agents"] == [{"name": "0.2.0", "devices": 1}]
    assert fleet["engines"] == [{"name": "light", "devices": 1}]
    assert api.delete(f"/v1/runs/{last}", token).status_code == 204
    assert version_of(api)["outcomes"]["failed"] == 1, "the run before it counts again"
    report(api, device, token, outcome="adopted", ended_at="2026-11-01T10:00:00Z")
    assert version_of(api)["outcomes"]["failed"] == 1, "an older run that was reported late does not count"


def test_the_rise_on_general_text_is_told_beside_the_improvement(api: Api) -> None:
    api.publish(api.package())
    device = api.device()
    token = device.token()
    general = {"general_loss_base": 3.0, "general_loss_personal": 3.0625, "strength": 6}
    run = report(api, device, token, **general)
    assert version_of(api)["general_rise"] == 0.0625
    told = api.get(f"/v1/runs/{run}", token).json()["metrics"]
    assert {name: told[name] for name in general} == general
    assert api.delete(f"/v1/runs/{run}", token).status_code == 204
    assert version_of(api)["general_rise"] is None


def test_numbers_that_a_device_makes_up_break_nothing(api: Api) -> None:
    api.publish(api.package())
    api.publish(api.package(seed=1))
    device = api.device()
    token = device.token()
    for version in (1, 2, 2**53 - 1):
        made_up = {"loss_base": 1e308, "loss_personal": -1e308, "general_loss_personal": 1e308}
        report(api, device, token, version=version, general_loss_base=-1e308, **made_up)
    report(api, device, token, release="no-such-release", peak_rss_bytes=2**53 - 1)
    assert (version_of(api)["improvement"], version_of(api)["general_rise"]) == (None, None)
    answer = api.get("/v1/releases/tiny/comparison")
    assert (answer.status_code, answer.json()["verdict"]) == (200, "too-few")


def test_a_watcher_sees_numbers_of_many_devices_and_nothing_else(api: Api) -> None:
    api.publish(api.package())
    device = api.device()
    token = device.token()
    run_id = report(api, device, token)
    watcher = api.operator(Role.WATCHER)
    fleet = api.get("/v1/fleet", watcher)
    assert fleet.status_code == 200
    assert fleet.json()["devices"] is None
    assert fleet.json()["days"] == []
    paths = ("/v1/devices", f"/v1/runs/{run_id}", "/v1/releases/tiny/comparison", "/v1/jobs")
    assert [api.get(path, watcher).status_code for path in paths] == [403] * 4
    assert api.get("/v1/fleet", token).status_code == 403


def test_a_comparison_needs_a_version_before(api: Api) -> None:
    api.publish(api.package())
    assert api.get("/v1/releases/tiny/comparison").status_code == 404
    api.publish(api.package(seed=1))
    api.post("/v1/releases/tiny/versions/1/yank", {"reason": "bad"})
    assert api.get("/v1/releases/tiny/comparison").status_code == 404
    assert api.get("/v1/releases/tiny/comparison?against=1").status_code == 200


@pytest.mark.parametrize(
    ("damage", "status"),
    [
        ("UPDATE releases SET created_at = 'yesterday' WHERE version = :version", 409),
        ("UPDATE runs SET gain = 'much' WHERE version = :version", 409),
        ("UPDATE runs SET loss = 'low' WHERE version = :version", 200),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_damaged_version_is_told_by_its_comparison(
    api: Api, version: int, damage: str, status: int
) -> None:
    for seed in (0, 1):
        api.publish(api.package(seed=seed))
    device = api.device()
    token = device.token()
    for told in (1, 2):
        report(api, device, token, version=told)
    with api.service.database.write() as session:
        session.execute(text(damage), {"version": version})
    answer = api.get("/v1/releases/tiny/comparison")
    assert answer.status_code == status
    if status == 409:
        assert f"Version {version} of 'tiny' cannot be compared" in answer.json()["detail"]


def test_text_in_place_of_a_version_stops_no_publication(api: Api) -> None:
    for seed in (0, 1):
        api.publish(api.package(seed=seed), alias=f"of-{seed}")
    with api.service.database.write() as session:
        session.execute(text("DELETE FROM aliases"))
        session.execute(text("UPDATE releases SET version = 'two' WHERE version = 2"))
    assert api.publish(api.package(seed=2))["version"] == 2
