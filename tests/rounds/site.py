"""A federation of the service under test: devices that send random integers, and a worker in this process."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import BaseModel
from sqlalchemy import update

from permille.store import tables
from permille_rounds.catch_up import caught_up
from permille_rounds.contribution import Contribution, encode_contribution
from permille_rounds.definition import Definition
from permille_rounds.rounds import History
from permille_rounds.schemas import (
    CONTRIBUTION_MEDIA_TYPE,
    AggregationCreate,
    ScheduleCreate,
    TrainingCreate,
)
from permille_rounds.store import rounds
from tests.api_service import Api, TestDevice
from tests.one_job import run_one

GROUPS: dict[str, type[BaseModel]] = {
    "schedule": ScheduleCreate,
    "training": TrainingCreate,
    "aggregation": AggregationCreate,
}
SMALL = {
    "name": "readers",
    "release": "tiny",
    "method": "zeroth-order",
    "steps": 3,
    "queries": 4,
    "rounds": 10,
    "learning_rate": 0.01,
    "epsilon": 0.001,
    "target": 3,
    "minimum": 2,
    "few_devices": True,
    "deadline_s": 3600,
}


def request_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request for a federation, with each field in its group."""
    body: dict[str, Any] = {}
    for name, value in fields.items():
        groups = (group for group, model in GROUPS.items() if name in model.model_fields)
        group = next(groups, None)
        (body if group is None else body.setdefault(group, {}))[name] = value
    return body


@dataclass(slots=True)
class Member:
    """A device of the federation, with its token and its copy of the history."""

    device: TestDevice
    secret: str
    history: History


@dataclass(slots=True)
class Site:
    """A federation and its members."""

    api: Api
    id: str
    definition: Definition
    members: list[Member] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"/v1/federations/{self.id}"

    def read(self) -> dict[str, Any]:
        """Return the federation as operators see it."""
        found: dict[str, Any] = self.api.get(self.path).json()
        return found

    def round(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"{self.path}/rounds/{number}").json()
        return found

    def join(self, count: int = 1, *, release: str = "tiny") -> list[Member]:
        """Enrol `count` devices that join the federation."""
        new = []
        for _ in range(count):
            device = self.api.device(release=release)
            member = Member(device=device, secret=device.token(), history=History.begin(self.definition))
            answer = self.api.client.put(f"{self.path}/membership", headers=self.api.auth(member.secret))
            assert answer.status_code == 204, answer.text
            new.append(member)
        self.members += new
        return new

    def invite(self, member: Member) -> Any:
        return self.api.post(f"{self.path}/invitations", None, member.secret)

    def catch_up(self, member: Member) -> None:
        """Bring a member's history to the newest round, as a device does."""
        answer = self.api.get(f"{self.path}/history?after={member.history.number}", member.secret)
        assert answer.status_code == 200, answer.text
        member.history = caught_up(member.history, answer.content, max_bytes=10_000_000)

    def contribution(
        self, member: Member, invitation: dict[str, Any], *, seed: int = 0, **changes: Any
    ) -> bytes:
        """Return a signed contribution of random integers."""
        rng = np.random.default_rng([seed, self.members.index(member), invitation["round"]])
        c_TQ = np.rint(rng.normal(0, 300, (self.definition.steps, self.definition.log.queries))).astype(
            np.int64
        )
        fields: dict[str, Any] = {
            "definition": self.definition,
            "round_number": invitation["round"],
            "weight": 1,
            "start_digest": invitation["start_digest"],
            "c_TQ": c_TQ,
            "gain": 100 + int(rng.integers(20)),
        }
        return encode_contribution(Contribution(**fields | changes), member.device.key)

    def send(self, member: Member, number: int, data: bytes, **headers: str) -> Any:
        sent = {**self.api.auth(member.secret), "Content-Type": CONTRIBUTION_MEDIA_TYPE, **headers}
        return self.api.client.put(f"{self.path}/rounds/{number}/contribution", content=data, headers=sent)

    def take_part(self, member: Member, *, seed: int = 0) -> Any:
        """Send one device's contribution to the open round. Return None if the device is not invited."""
        self.catch_up(member)
        answer = self.invite(member)
        if answer.status_code == 204:
            return None
        invitation = answer.json()
        assert invitation["start_digest"] == member.history.digest
        return self.send(member, invitation["round"], self.contribution(member, invitation, seed=seed))

    def work(self) -> int:
        """Run all queued jobs, one attempt each. Return the number of jobs."""
        count = 0
        while run_one(self.api):
            count += 1
        return count

    def pass_deadline(self) -> None:
        """Move the deadline of the open round into the past, and sweep."""
        with self.api.service.database.write() as session:
            opened = tables.Round.opened_at
            session.execute(
                update(tables.Round).where(tables.Round.state == "open").values(deadline_at=opened)
            )
        rounds.sweep(self.api.service.database)


def make_site(api: Api, *, members: int = 0, start: bool = True, **changes: Any) -> Site:
    """Make a federation on a release of a tiny package."""
    if not api.get("/v1/releases").json()["items"]:
        api.publish(api.package())
    answer = api.post("/v1/federations", request_of(SMALL | changes))
    assert answer.status_code == 201, answer.text
    data = api.get(f"/v1/federations/{answer.json()['id']}/definition").content
    site = Site(api=api, id=answer.json()["id"], definition=Definition.from_bytes(data))
    if start:
        assert api.post(f"{site.path}/start").status_code == 200
        site.join(members)
    return site
