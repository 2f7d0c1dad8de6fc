"""Tests of concurrent events in rounds: contributions, deadlines, departures, and two sweepers."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select

from permille.errors import InputError
from permille.schemas.fields import EXAMPLE_ULID
from permille.schemas.jobs import JobKind
from permille.store import audit, devices, rows, tables
from permille.store.audit import Change
from permille.store.database import Database
from permille.store.errors import NotFoundError, RoundClosedError
from permille.store.jobs import claims, queue
from permille.store.rows import Window
from permille.store.tables import Federation, Job, Participation, Release, Round
from permille_rounds.definition import encode_key
from permille_rounds.store import contributions, definitions, history, members, rounds
from permille_rounds.store.contributions import Sent
from permille_rounds.store.definitions import NewFederation
from tests.rounds.federations import make_definition
from tests.unit.store.conftest import Clock

DEADLINE_S = 60


class Site:
    """A running federation in a database. Its members can be invited to the open round."""

    def __init__(
        self,
        db: Database,
        tenant_id: str,
        *,
        target: int,
        minimum: int = 1,
        count: int = 8,
        deadline_s: int = DEADLINE_S,
    ) -> None:
        self.db, self.tenant_id = db, tenant_id
        new = NewFederation(
            name="f", definition=make_definition(minimum=minimum), target=target, deadline_s=deadline_s
        )
        release = Release(tenant_id=tenant_id, name="tiny", version=1, package_digest="sha256:" + "0" * 64)
        with db.write() as session:
            row = definitions.add(session, release=release, new=new)
            self.id = row.id
            definitions.start(session, row)
            self.devices = [self._device(session, row) for _ in range(count)]

    def _device(self, session: Any, row: Federation) -> str:
        _, code = devices.invite(session, tenant_id=self.tenant_id, release="tiny", alias="stable")
        key = encode_key(Ed25519PrivateKey.generate().public_key())
        device_id = devices.enrol(
            session, code=code, public_key=key, name="n", agent_version="0.1.0"
        ).device.id
        members.join(session, federation=row, device_id=device_id)
        return device_id

    def invite_all(self) -> None:
        for device_id in self.devices:
            with self.db.write() as session:
                row = session.get_one(Federation, self.id)
                assert contributions.invite(session, federation=row, device_id=device_id)

    def send(self, device_id: str, number: int = 0) -> bool:
        """Send a contribution. Return False if it came too late or the device has left."""
        sent = Sent(
            federation_id=self.id, number=number, device_id=device_id, data=b"data", digest=f"d-{device_id}"
        )
        try:
            with self.db.write() as session:
                row = session.get_one(Federation, self.id)
                contributions.accept(session, federation=row, sent=sent)
        except (RoundClosedError, NotFoundError):
            return False
        return True

    def leave(self, device_id: str) -> None:
        with self.db.write() as session:
            members.leave(session, device_id=device_id)

    def revoke(self, device_id: str) -> None:
        with self.db.write() as session:
            devices.revoke(session, tenant_id=self.tenant_id, device_id=device_id)
            session.flush()
            members.leave(session, device_id=device_id)

    def round(self, number: int = 0) -> Round:
        with self.db.read() as session:
            return session.get_one(Round, (self.id, number))

    def held(self) -> set[str]:
        """Return the ids of the devices with a stored contribution."""
        with self.db.read() as session:
            query = select(Participation.device_id).where(Participation.data.is_not(None))
            return set(session.scalars(query))

    def jobs(self) -> Sequence[Job]:
        with self.db.read() as session:
            return queue.list_jobs(
                session, tenant_id=self.tenant_id, wanted=queue.JobFilter(kind=JobKind.ROUND)
            ).items


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Call all functions in threads that begin together. Return their results."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(run, call) for call in calls]]


def test_the_last_of_many_at_once_adds_the_only_job(db: Database, tenant_id: str) -> None:
    site = Site(db, tenant_id, target=8)
    site.invite_all()
    assert at_once(*(partial(site.send, one) for one in site.devices)) == [True] * 8
    assert len(site.jobs()) == 1
    assert (site.round().state, site.held()) == ("closing", set(site.devices))


def test_the_same_bytes_at_once_are_one_contribution(db: Database, tenant_id: str) -> None:
    site = Site(db, tenant_id, target=2, count=2)
    site.invite_all()
    first = site.devices[0]
    assert at_once(*[lambda: site.send(first)] * 4) == [True] * 4
    assert (site.round().state, site.held(), site.jobs()) == ("open", {first}, ())


def test_what_comes_while_the_deadline_passes_is_counted_or_refused(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    site = Site(db, tenant_id, target=8)
    site.invite_all()
    early, *others = site.devices
    assert site.send(early)
    clock.forward(DEADLINE_S)
    calls = [partial(site.send, one) for one in others]
    taken = at_once(lambda: rounds.sweep(db), lambda: rounds.sweep(db), *calls)
    assert not any(taken[2:])
    assert site.held() == {early}
    assert len(site.jobs()) == 1


@pytest.mark.parametrize("how", ["leave", "revoke"])
def test_nobody_who_is_gone_stays_in_an_open_round(db: Database, tenant_id: str, how: str) -> None:
    site = Site(db, tenant_id, target=9)
    site.invite_all()
    calls = [
        call for one in site.devices for call in (partial(site.send, one), partial(getattr(site, how), one))
    ]
    at_once(*calls)
    assert site.held() == set()
    assert (site.round().state, site.jobs()) == ("open", ())


def test_two_sweepers_end_a_round_of_too_few_once(db: Database, tenant_id: str, clock: Clock) -> None:
    site = Site(db, tenant_id, target=8, minimum=2)
    site.invite_all()
    site.send(site.devices[0])
    clock.forward(DEADLINE_S)
    at_once(*[lambda: rounds.sweep(db)] * 3)
    assert (site.round().state, site.round(1).state, site.jobs()) == ("void", "open", ())
    with db.read() as session:
        assert session.get_one(Federation, site.id).number == 1
    assert site.held() == set()


def test_a_cursor_that_exceeds_the_column_is_refused(db: Database, tenant_id: str) -> None:
    site = Site(db, tenant_id, target=8, count=1)
    with db.read() as session:
        row = session.get_one(Federation, site.id)
        for cursor in ("9" * 10, "-1", "x"):
            with pytest.raises(InputError, match="cursor"):
                history.list_rounds(session, row, Window(cursor=cursor))


def test_a_round_of_a_week_is_swept(db: Database, tenant_id: str, clock: Clock) -> None:
    """A week has more microseconds than 32 bits hold."""
    site = Site(db, tenant_id, target=8, deadline_s=7 * 86_400)
    site.invite_all()
    site.send(site.devices[0])
    rounds.sweep(db)
    assert site.round().state == "open"
    clock.forward(7 * 86_400)
    rounds.sweep(db)
    assert site.round().state == "closing"


@pytest.mark.parametrize("way", ["failed", "cancelled", "dead"])
def test_a_round_whose_job_ends_without_it_is_void_with_the_reason(
    db: Database, tenant_id: str, clock: Clock, way: str
) -> None:
    site = Site(db, tenant_id, target=2, count=2)
    site.invite_all()
    for one in site.devices:
        site.send(one)
    [job] = site.jobs()
    if way == "cancelled":
        with db.write() as session:
            queue.request_cancel(session, tenant_id=tenant_id, job_id=job.id)
    for _ in range(30):
        clock.forward(600)
        with db.write() as session:
            claim = claims.claim(session, worker="w", lease_s=1)
            if claim is not None:
                error = {"type": "InputError", "message": "no disk"}
                claims.fail(session, claim, error=error, retryable=way == "dead")
    at_once(lambda: rounds.sweep(db), lambda: rounds.sweep(db))
    found = site.round()
    assert found.state == "void"
    assert found.reason is not None
    assert f"{job.id} is {way}" in found.reason
    assert ("no disk" in found.reason) == (way != "cancelled")
    with db.write() as session:
        row = session.get_one(Federation, site.id)
        assert row.state == ("paused" if way == "failed" else "running")
        definitions.start(session, row)
    assert site.round(1).state == "open"


def test_who_has_left_is_invited_no_more(db: Database, tenant_id: str) -> None:
    site = Site(db, tenant_id, target=9, count=1)
    [device_id] = site.devices
    with db.write() as session:
        members.leave(session, device_id=device_id)
        row = session.get_one(Federation, site.id)
        assert members.count(session, row.id) == 0
        with pytest.raises(NotFoundError):
            contributions.invite(session, federation=row, device_id=device_id)


def test_operators_and_devices_at_once_wait_for_nobody_in_a_circle(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    site = Site(db, tenant_id, target=8)
    site.invite_all()

    def change_federation(change: Callable[[Any, Federation], Any]) -> None:
        """Make an operator's change. It locks the federation first, and the tenant's audit log last."""
        with db.write() as session:
            row = rows.lock(session, tables.Federation, tenant_id=tenant_id, row_id=site.id)
            change(session, row)
            change_noted = Change(token_id=f"operator_{EXAMPLE_ULID}", action="a", subject="s")
            audit.append(session, tenant_id=tenant_id, change=change_noted)

    def rejoin(device_id: str) -> None:
        with db.write() as session:
            row = session.get_one(Federation, site.id)
            members.leave(session, device_id=device_id, federation_id=site.id)
            members.join(session, federation=row, device_id=device_id)

    calls: list[Callable[[], Any]] = []
    for one in site.devices:
        calls += [partial(site.send, one), partial(rejoin, one)]

    def pause(_: Any, row: Federation) -> None:
        definitions.pause(row)

    calls += [partial(change_federation, pause), partial(change_federation, definitions.start)] * 3
    at_once(*calls, partial(rounds.sweep, db))
    change_federation(definitions.finish)
    assert site.round().state in ("closing", "void")
    with db.read() as session:
        assert len(audit.entries_after(session, tenant_id=tenant_id, seq=0, limit=50)) == 7


def test_a_round_of_the_wrong_time_ends_in_its_time(db: Database, tenant_id: str, clock: Clock) -> None:
    clock.forward(366 * 86_400.0)
    site = Site(db, tenant_id, target=8)
    clock.forward(-366 * 86_400.0)
    rounds.sweep(db)
    assert site.round().deadline_at == clock.at + timedelta(seconds=DEADLINE_S)
