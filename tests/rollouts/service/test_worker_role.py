"""A worker's database role can advance rollouts and send webhooks."""

from permille_rollouts.workers.webhooks import send_due
from tests.attacks.test_worker_role import Place, place, server, sweep

__all__ = ["place", "server"]


def test_rollouts_advance(place: Place) -> None:
    api = place.api
    assert api.post("/v1/webhooks", {"url": "https://127.0.0.1:9/"}).status_code == 201
    api.publish(api.package())
    for _ in range(3):
        api.device()
    body = {"name": "tiny", "package_digest": api.package(seed=1).digest}
    assert api.post("/v1/releases", body).status_code == 201
    wave = {"waves": ["100%"], "min_reports": 2, "soak_s": 60, "deadline_s": 3600}
    made = api.post("/v1/rollouts", {"release": "tiny", "rules": wave}).json()
    sweep(place, 3661)
    assert api.get(f"/v1/rollouts/{made['id']}").json()["reason"] == "silence"
    assert api.get("/v1/audit?after=0&limit=200").json()[-1]["action"] == "halt_rollout"
    assert send_due(place.worker.service.database, lambda *_: "refused") == 1
