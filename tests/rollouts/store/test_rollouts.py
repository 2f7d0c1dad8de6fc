"""Tests of rollouts in both databases: each device's report counts once and decides about the next wave."""

from typing import Any

import pytest

from permille.store import audit, releases, rows, tables
from permille.store.database import Database
from permille.store.errors import ConflictError, NotFoundError
from permille.store.ids import Prefix, new_id
from permille.store.tables import Device, Rollout
from permille_rollouts.offer import ReportCode, RolloutState, place_of
from permille_rollouts.schemas.groups import GroupRule
from permille_rollouts.schemas.rollouts import RolloutCreate, RolloutReport, RolloutRules
from permille_rollouts.store import groups, rollouts
from tests.unit.store.conftest import Clock
from tests.unit.store.test_devices import enrol, invite
from tests.unit.store.test_releases import add_package, publish

RULES = RolloutRules(waves=["50%", "100%"], min_reports=4, soak_s=60, deadline_s=600, success_percent=90)


@pytest.fixture
def devices(db: Database, tenant_id: str) -> list[Device]:
    made = [enrol(db, invite(db, tenant_id), f"{number:043d}").device for number in range(30)]
    publish(db, add_package(db, tenant_id), alias="stable")
    publish(db, add_package(db, tenant_id, "2"))
    return made


def start(db: Database, tenant_id: str, **changes: Any) -> Rollout:
    body = RolloutCreate(**{"release": "tiny", "rules": RULES, **changes})
    with db.write() as session:
        row = rollouts.create(session, tenant_id=tenant_id, token_id=new_id(Prefix.OPERATOR), body=body)
        rollouts.resume(session, row)
        return row


def report(db: Database, device: Device, rollout: Rollout, **fields: Any) -> None:
    with db.write() as session:
        own = session.get(Device, device.id)
        assert own is not None
        rollouts.report(session, device=own, rollout_id=rollout.id, report=RolloutReport(**fields))


def now_of(db: Database, rollout: Rollout) -> Rollout:
    with db.read() as session:
        row = session.get(Rollout, rollout.id)
        assert row is not None
        return row


def test_one_broken_rollout_stops_no_later_one(
    db: Database, tenant_id: str, clock: Clock, devices: list[Device]
) -> None:
    packages = [add_package(db, tenant_id, version) for version in ("3", "4")]
    with db.write() as session:
        first, _ = (releases.publish(session, name="other", package=package) for package in packages)
        releases.set_alias(session, tenant_id=tenant_id, name="other", alias="stable", version=first.version)
    broken, whole = start(db, tenant_id, release="other"), start(db, tenant_id)
    with db.write() as session:
        session.get_one(Rollout, broken.id).rules = {"waves": []}
    clock.forward(RULES.soak_s + RULES.deadline_s)
    with pytest.raises(ValueError, match="waves"):
        rollouts.sweep(db)
    assert now_of(db, whole).state == RolloutState.PAUSED


def test_reports_are_counted_by_wave_and_open_the_next_one(
    db: Database, tenant_id: str, clock: Clock, devices: list[Device]
) -> None:
    rollout = start(db, tenant_id)
    first = [one for one in devices if place_of(rollout.id, one.id) < 5000]
    assert rollout.wave_devices == len(first)
    for number, device in enumerate(first):
        report(db, device, rollout)
        report(db, device, rollout, installed=True)
        worse = number == 0
        report(db, device, rollout, installed=True, code="ok", worse=worse, difference=0.03 * worse)
    with db.read() as session:
        counts = rollouts.funnel(session, rollout.id, 2)[0]
        told = rollouts.tally(session, now_of(db, rollout))
    assert (counts["offered"], counts["installed"], counts["worse"], counts["better"]) == (
        *(len(first), len(first)),
        *(1, len(first) - 1),
    )
    assert (told.ended, told.judged, told.worse, told.wave_ok) == (len(first), len(first), 1, len(first))
    assert told.losses.n == len(first) and told.losses.mean == pytest.approx(0.03 / len(first))
    rollouts.sweep(db)
    assert now_of(db, rollout).wave == 0
    clock.forward(61)
    rollouts.sweep(db)
    row = now_of(db, rollout)
    assert (row.wave, row.wave_devices, row.revision) == (1, len(devices) - len(first), 2)


def test_a_silent_device_ends_and_a_resume_leaves_it_behind(
    db: Database, tenant_id: str, clock: Clock, devices: list[Device]
) -> None:
    rollout = start(db, tenant_id, rules=RULES.model_copy(update={"waves": ["100%"]}))
    for device in devices[:10]:
        report(db, device, rollout)
    clock.forward(601)
    rollouts.sweep(db)
    row = now_of(db, rollout)
    assert (row.state, row.reason) == (RolloutState.PAUSED, "success")
    with db.read() as session:
        assert rollouts.tally(session, row).codes == {ReportCode.SILENT: 10}
        (entry,) = audit.entries_after(session, tenant_id=tenant_id, seq=0, limit=9)
    assert (entry.action, entry.request) == (
        "halt_rollout",
        {"reason": "success", "wave": 1, "ok": 0, "of": 10, "needed_percent": 90.0},
    )
    clock.forward(1)
    with db.write() as session:
        rollouts.resume(session, rows.lock(session, tables.Rollout, tenant_id=tenant_id, row_id=rollout.id))
    with db.read() as session:
        told = rollouts.tally(session, now_of(db, rollout))
    assert (told.ended, told.wave_began, told.wave_devices) == (0, 0, len(devices) - 10)


def test_a_resume_after_silence_gives_the_wave_its_time_again(
    db: Database, tenant_id: str, clock: Clock, devices: list[Device]
) -> None:
    rollout = start(db, tenant_id)
    clock.forward(RULES.soak_s + RULES.deadline_s)
    rollouts.sweep(db)
    assert (now_of(db, rollout).state, now_of(db, rollout).reason) == (RolloutState.PAUSED, "silence")
    with db.write() as session:
        rollouts.resume(session, rows.lock(session, tables.Rollout, tenant_id=tenant_id, row_id=rollout.id))
    rollouts.sweep(db)
    assert now_of(db, rollout).state == RolloutState.RUNNING
    clock.forward(RULES.soak_s + RULES.deadline_s)
    rollouts.sweep(db)
    assert now_of(db, rollout).state == RolloutState.PAUSED


def test_an_alias_has_one_rollout_at_a_time(db: Database, tenant_id: str, devices: list[Device]) -> None:
    rollout = start(db, tenant_id)
    with pytest.raises(ConflictError, match="has not ended"):
        start(db, tenant_id)
    with db.write() as session:
        rollouts.stop(session, rows.lock(session, tables.Rollout, tenant_id=tenant_id, row_id=rollout.id))
    assert start(db, tenant_id).state == RolloutState.RUNNING


def test_tags_of_devices_choose(db: Database, tenant_id: str, devices: list[Device]) -> None:
    with db.write() as session:
        groups.put_tags(session, tenant_id=tenant_id, device_id=devices[3].id, tags=["eu", "canary", "eu"])
    with db.read() as session:
        found = groups.candidates(session, tenant_id=tenant_id, release="tiny", alias="stable")
    assert len(found) == len(devices)
    (one,) = groups.chosen(GroupRule(tags=["canary"]), found)
    assert (one.id, one.tags) == (devices[3].id, frozenset({"eu", "canary"}))


def test_a_device_outside_the_group_does_not_count(
    db: Database, tenant_id: str, devices: list[Device]
) -> None:
    with db.write() as session:
        rule = GroupRule(devices=[devices[3].id])
        group_id = groups.create(session, tenant_id=tenant_id, name="canary", rule=rule).id
    rollout = start(db, tenant_id, group_id=group_id, rules=RULES.model_copy(update={"waves": ["100%"]}))
    with pytest.raises(ConflictError, match="not open"):
        report(db, devices[4], rollout, code="integrity", damage="blob-digest")
    report(db, devices[3], rollout, installed=True, code="ok")
    with db.read() as session:
        assert rollouts.tally(session, now_of(db, rollout)).codes == {ReportCode.OK: 1}


def test_a_device_that_is_tagged_after_the_start_does_not_count(
    db: Database, tenant_id: str, clock: Clock, devices: list[Device]
) -> None:
    with db.write() as session:
        for device in devices[:20]:
            groups.put_tags(session, tenant_id=tenant_id, device_id=device.id, tags=["canary"])
        rule = GroupRule(tags=["canary"])
        group_id = groups.create(session, tenant_id=tenant_id, name="canaries", rule=rule).id
    rollout = start(db, tenant_id, group_id=group_id, rules=RULES.model_copy(update={"min_reports": 1}))
    first = [one for one in devices[:20] if place_of(rollout.id, one.id) < 5000]
    with db.write() as session:
        for device in devices:
            tags = ["canary"] if device in devices[20:] else []
            groups.put_tags(session, tenant_id=tenant_id, device_id=device.id, tags=tags)
    for device in first:
        report(db, device, rollout, installed=True, code="ok")
    clock.forward(61)
    rollouts.sweep(db)
    row = now_of(db, rollout)
    assert (row.wave, row.wave_devices) == (1, 20 - len(first))


def test_a_rollout_that_was_stopped_as_a_draft_takes_no_report(
    db: Database, tenant_id: str, devices: list[Device]
) -> None:
    with db.write() as session:
        body = RolloutCreate(release="tiny", rules=RULES)
        row = rollouts.create(session, tenant_id=tenant_id, token_id=new_id(Prefix.OPERATOR), body=body)
        rollouts.stop(session, row)
    with pytest.raises(NotFoundError, match="no rollout"):
        report(db, devices[0], row, code="ok")


def test_a_wave_may_be_a_number_of_devices(
    db: Database, tenant_id: str, clock: Clock, devices: list[Device]
) -> None:
    rules = RULES.model_copy(update={"waves": ["4", "100%"]})
    rollout = start(db, tenant_id, rules=rules)
    assert rollout.wave_devices == 4
    offer = rollouts.offer_of(rollout)
    assert offer is not None
    taken = [one for one in devices if place_of(rollout.id, one.id) < offer.places]
    assert len(taken) == 4
    for device in taken:
        report(db, device, rollout, installed=True, code="ok")
    clock.forward(61)
    rollouts.sweep(db)
    row = now_of(db, rollout)
    assert (row.wave, row.wave_devices) == (1, len(devices) - 4)


def test_a_rollout_whose_first_wave_holds_all_devices_does_not_start(
    db: Database, tenant_id: str, devices: list[Device]
) -> None:
    rules = RULES.model_copy(update={"waves": ["30", "100%"]})
    with pytest.raises(ConflictError, match=r"Of 30 devices, wave 1 \(30\) holds all of wave 2"):
        start(db, tenant_id, rules=rules)


def test_an_approval_stays_when_a_rollout_pauses_and_is_resumed(
    db: Database, tenant_id: str, devices: list[Device]
) -> None:
    rollout = start(db, tenant_id, rules=RULES.model_copy(update={"approval": True}))
    with db.write() as session:
        row = session.get(Rollout, rollout.id)
        assert row is not None
        rollouts.approve(row, 2)
        rollouts.pause(row)
        rollouts.resume(session, row)
    assert now_of(db, rollout).approved == 2


def test_only_the_next_wave_can_be_approved(db: Database, tenant_id: str, devices: list[Device]) -> None:
    rules = RULES.model_copy(update={"approval": True, "waves": ["10%", "50%", "100%"]})
    rollout = start(db, tenant_id, rules=rules)
    with db.write() as session:
        row = session.get(Rollout, rollout.id)
        assert row is not None
        for wave in (1, 3):
            with pytest.raises(ConflictError, match=rf"Wave {wave} is not the next one\. Approve wave 2\."):
                rollouts.approve(row, wave)
        rollouts.approve(row, 2)
        row.wave = 2
        rollouts.approve(row, 3)  # a repeated request changes nothing
        with pytest.raises(ConflictError, match=r"Wave 4 is not the next one\. All waves are open\."):
            rollouts.approve(row, 4)


def test_a_wave_that_opened_while_the_clock_was_ahead_ends_in_its_time(
    db: Database, tenant_id: str, clock: Clock, devices: list[Device]
) -> None:
    clock.forward(366 * 86_400)
    rollout = start(db, tenant_id, rules=RULES.model_copy(update={"waves": ["100%"]}))
    report(db, devices[0], rollout)
    clock.forward(-366 * 86_400)
    rollouts.sweep(db)
    clock.forward(RULES.soak_s + RULES.deadline_s + 1)
    rollouts.sweep(db)
    row = now_of(db, rollout)
    with db.read() as session:
        assert rollouts.tally(session, row).codes == {ReportCode.SILENT: 1}
    assert (row.state, row.reason) == (RolloutState.PAUSED, "silence")


def test_a_clock_that_goes_back_after_a_resume_loses_no_report(
    db: Database, tenant_id: str, clock: Clock, devices: list[Device]
) -> None:
    rollout = start(db, tenant_id, rules=RULES.model_copy(update={"waves": ["100%"]}))
    report(db, devices[0], rollout, code="crash")
    with db.write() as session:
        row = session.get(Rollout, rollout.id)
        assert row is not None
        rollouts.pause(row)
        rollouts.resume(session, row)
    clock.forward(-3600)
    report(db, devices[1], rollout, code="crash")
    with db.read() as session:
        told = rollouts.tally(session, now_of(db, rollout))
    assert (told.ended, told.wave_ended, told.wave_devices) == (1, 1, len(devices) - 1)
