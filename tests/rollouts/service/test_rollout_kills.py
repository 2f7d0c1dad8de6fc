"""SIGKILL at each step of a rollout: nothing is lost, and nothing is done twice.

A child process does the step on the same database. It dies in its transaction, before the commit, or after
the commit but before the caller gets an answer. Then the caller tries again.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.orm import Session

from permille.store.tables import Rollout, RolloutReport, WebhookDelivery
from permille_rollouts.store import rollouts, webhooks
from permille_rollouts.workers.webhooks import send_due
from tests.api_service import Api, running_api

MOMENTS = (
    pytest.param("after_flush", marks=pytest.mark.slow),
    pytest.param("before_commit", marks=pytest.mark.slow),
    "after_commit",
)
RULES = {"waves": ["50%", "100%"], "min_reports": 1, "soak_s": 0, "deadline_s": 3600}
KEY = "rollout-1"


def sweep(api: Api) -> None:
    rollouts.sweep(api.service.database)


def post(path: str, body: Any = None) -> Callable[[Api], None]:
    def act(api: Api) -> None:
        answer = api.post(path.format(id=newest(api)), body)
        assert answer.status_code == 200, answer.text

    return act


def create(api: Api, **rules: Any) -> dict[str, Any]:
    body = {"release": "tiny", "rules": {**RULES, **rules}}
    answer = api.post("/v1/rollouts", body, key=KEY)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def newest(api: Api) -> str:
    return str(api.get("/v1/rollouts").json()["items"][0]["id"])


def report(api: Api, tokens: list[str], **body: Any) -> list[str]:
    """Let the devices whose wave is open report. Return their tokens."""
    path = f"/v1/device/rollouts/{newest(api)}/report"
    return [token for token in tokens if api.put(path, body, token).status_code == 204]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a rollout.

    Attributes:
        before: Brings the rollout to the step. It gets the tokens of twelve devices.
        act: Does the step.
        state: State of the rollout after the step.
        wave: Wave of the rollout after the step.
        events: Events that webhooks get.
        actions: Actions of this rollout in the audit log.
    """

    before: Callable[[Api, list[str]], object]
    act: Callable[[Api], object]
    state: str
    wave: int = 1
    events: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()


def nothing(_api: Api, _tokens: list[str]) -> None:
    pass


def running(api: Api, _tokens: list[str]) -> None:
    create(api)


def paused(api: Api, tokens: list[str]) -> None:
    running(api, tokens)
    post("/v1/rollouts/{id}/pause")(api)


def awaiting(api: Api, _tokens: list[str]) -> None:
    create(api, approval=True)


def first_wave_done(api: Api, tokens: list[str]) -> None:
    create(api)
    assert report(api, tokens, installed=True, code="ok")


def all_done(api: Api, tokens: list[str]) -> None:
    first_wave_done(api, tokens)
    sweep(api)
    assert len(report(api, tokens, installed=True, code="ok")) == len(tokens)


def damaged(api: Api, tokens: list[str]) -> None:
    create(api, waves=["100%"])
    assert len(report(api, tokens[:4], code="integrity", damage="blob-digest")) == 4


STEPS = {
    "create": Step(before=nothing, act=create, state="running", actions=("create_rollout",)),
    "pause": Step(before=running, act=post("/v1/rollouts/{id}/pause"), state="paused"),
    "resume": Step(before=paused, act=post("/v1/rollouts/{id}/resume"), state="running"),
    "approve": Step(before=awaiting, act=post("/v1/rollouts/{id}/approve", {"wave": 2}), state="running"),
    "advance": Step(before=first_wave_done, act=sweep, state="running", wave=2),
    "end": Step(before=all_done, act=sweep, state="done", wave=2, events=("rollout.done",)),
    "halt": Step(
        before=damaged,
        act=sweep,
        state="paused",
        events=("rollout.halted",),
        actions=("create_rollout", "halt_rollout"),
    ),
    "stop": Step(
        before=running,
        act=post("/v1/rollouts/{id}/stop"),
        state="stopped",
        events=("rollout.stopped",),
    ),
    "revert": Step(
        before=first_wave_done,
        act=post("/v1/rollouts/{id}/revert"),
        state="reverted",
        events=("rollout.reverted", "rollout.stopped"),
    ),
}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path, sign_ins_per_minute=10_000) as made:
        made.publish(made.package())
        body = {"name": "tiny", "package_digest": made.package(seed=1).digest}
        assert made.post("/v1/releases", body).status_code == 201
        assert made.post("/v1/webhooks", {"url": "https://hooks.example.org/"}).status_code == 201
        yield made


def kill_in(folder: Path, moment: str, act: Callable[[Api], object]) -> None:
    """Do a step in a child that dies at the first transaction that changes a row of a rollout."""
    child = multiprocessing.get_context("fork").Process(target=_die, args=(folder, moment, act))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL


def _die(folder: Path, moment: str, act: Callable[[Api], object]) -> None:
    rows = (Rollout, RolloutReport, WebhookDelivery)

    def look(session: Session, *_: object) -> None:
        session.info["changes"] = session.info.get("changes") or any(
            isinstance(row, rows) for row in (*session.new, *session.dirty)
        )

    def die(session: Session, *_: object) -> None:
        if moment == "before_commit":
            # A commit flushes only after this event, so without this the changes may be unknown here.
            session.flush()
        if session.info.get("changes"):
            os.kill(os.getpid(), signal.SIGKILL)

    with running_api(folder, sign_ins_per_minute=10_000) as api:
        event.listen(Session, "before_flush", look)
        event.listen(Session, moment, die)
        act(api)
    os._exit(1)  # the step ended without a kill


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_was_killed_is_done_once(api: Api, tmp_path: Path, name: str, moment: str) -> None:
    step = STEPS[name]
    tokens = [api.device().token() for _ in range(12)]
    step.before(api, tokens)
    kill_in(tmp_path, moment, step.act)
    if not (name == "revert" and moment == "after_commit"):  # a finished revert cannot be requested again
        step.act(api)
    assert api.get("/v1/trust/metadata/timestamp.json", tokens[0]).status_code == 200, "a poll signs"
    [found] = api.get("/v1/rollouts").json()["items"]
    assert (found["state"], found["wave"]) == (step.state, step.wave)
    with api.service.database.read() as session:
        row = session.get(Rollout, found["id"])
        assert row is not None
        assert row.signed_revision == row.revision
        assert sorted(session.scalars(select(WebhookDelivery.event))) == sorted(step.events)
    versions = [one["version"] for one in api.get("/v1/releases?name=tiny").json()["items"]]
    assert sorted(versions) == ([1, 2, 3] if name == "revert" else [1, 2])
    subject = f"/v1/rollouts/{found['id']}"
    entries = [one for one in api.get("/v1/audit?limit=200").json() if one["subject"] == subject]
    if step.actions:
        assert [one["action"] for one in entries] == list(step.actions)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_report_that_was_killed_counts_once(api: Api, tmp_path: Path, moment: str) -> None:
    token = api.device().token()
    create(api, waves=["100%"])
    kill_in(tmp_path, moment, lambda other: report(other, [token], installed=True, code="ok"))
    assert report(api, [token], installed=True, code="ok") == [token]
    [funnel] = api.get("/v1/rollouts").json()["items"][0]["funnel"]
    assert (funnel["offered"], funnel["installed"], funnel["failed"]) == (1, 1, 0)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_killed_while_it_sends_a_webhook_loses_no_event(
    api: Api, tmp_path: Path, moment: str
) -> None:
    create(api)
    post("/v1/rollouts/{id}/stop")(api)
    sent = list[str]()

    def send(message: webhooks.Message, _at: object) -> None:
        sent.append(message.id)

    kill_in(tmp_path, moment, lambda other: send_due(other.service.database, send))
    with api.service.database.write() as session:
        for row in session.scalars(select(WebhookDelivery)):
            row.next_at = row.created_at  # The claim of the killed worker has expired.
    assert send_due(api.service.database, send) == 1
    assert len(sent) == 1
    with api.service.database.read() as session:
        [row] = session.scalars(select(WebhookDelivery))
        assert row.next_at is None and row.failure is None
