"""Tests of devices: invitations and nonces work once, and revocation takes effect at once."""

from datetime import datetime, timedelta

import pytest

from permille.store import devices, rows
from permille.store.access import find_caller
from permille.store.database import Database
from permille.store.devices import Enrolment, InvitationError
from permille.store.errors import NotFoundError
from permille.store.ids import hash_secret
from permille.store.tables import Device, DeviceNonce, DeviceToken, Invitation
from tests.unit.store.conftest import Clock

KEY, OTHER_KEY = "k" * 43, "o" * 43


def invite(db: Database, tenant_id: str) -> str:
    with db.write() as session:
        return devices.invite(session, tenant_id=tenant_id, release="tiny", alias="stable")[1]


def enrol(db: Database, code: str, key: str = KEY) -> Enrolment:
    with db.write() as session:
        return devices.enrol(session, code=code, public_key=key, name="laptop", agent_version="0.1.0")


def token_of(db: Database, device: Device) -> str:
    with db.write() as session:
        return devices.issue_token(session, device=device)[0]


def authenticated(db: Database, secret: str) -> str | None:
    found = find_caller(db, secret)
    return None if found is None else found.caller_id


def test_an_invitation_enrols_one_device_and_a_failed_enrolment_leaves_none(
    db: Database, tenant_id: str
) -> None:
    code = invite(db, tenant_id)
    enrolment = enrol(db, code)
    assert (enrolment.created, enrolment.device.tenant_id, enrolment.device.release) == (
        True,
        tenant_id,
        "tiny",
    )
    with pytest.raises(InvitationError):
        enrol(db, code, OTHER_KEY)
    with db.read() as session:
        assert len(rows.list_all(session, Device, tenant_id=tenant_id).items) == 1


def test_the_same_key_enrols_again_to_the_same_device(db: Database, tenant_id: str) -> None:
    code = invite(db, tenant_id)
    first, again = enrol(db, code), enrol(db, code)
    assert (again.device.id, again.created) == (first.device.id, False)
    by_new_code = enrol(db, invite(db, tenant_id))
    assert (by_new_code.device.id, by_new_code.created) == (first.device.id, False)


def test_codes_that_are_no_good_are_refused_alike(db: Database, tenant_id: str, clock: Clock) -> None:
    expired, revoked = invite(db, tenant_id), invite(db, tenant_id)
    with db.write() as session:
        newest = rows.list_all(session, Invitation, tenant_id=tenant_id).items
        row = next(i for i in newest if i.code_hash == hash_secret(revoked))
        devices.revoke_invitation(session, tenant_id=tenant_id, invitation_id=row.id)
    messages = []
    for code, wait in ((revoked, timedelta(0)), ("unknown", timedelta(0)), (expired, timedelta(hours=24))):
        clock.at += wait
        with pytest.raises(InvitationError) as caught:
            enrol(db, code)
        messages.append(str(caught.value))
    assert len(set(messages)) == 1


def test_secrets_are_stored_hashed_only(db: Database, tenant_id: str) -> None:
    code = invite(db, tenant_id)
    secret = token_of(db, enrol(db, code).device)
    with db.read() as session:
        stored = {row.code_hash for row in session.query(Invitation)}
        stored |= {row.token_hash for row in session.query(DeviceToken)}
    assert len(stored) == 2
    assert not stored & {code, secret}


def is_let_in(db: Database, device: Device, nonce: str, issued_at: datetime) -> bool:
    with db.write() as session:
        used = devices.use_nonce(session, device_id=device.id, nonce=nonce, issued_at=issued_at)
        assert used is None or used.id == device.id
        return used is not None


def test_a_nonce_is_used_once_in_its_time(db: Database, tenant_id: str, clock: Clock) -> None:
    device, at = enrol(db, invite(db, tenant_id)).device, clock.at
    assert not is_let_in(db, device, "of the future", at + timedelta(seconds=1))
    assert is_let_in(db, device, "first", at)
    assert not is_let_in(db, device, "first", at)
    clock.forward(5 * 60 - 1)
    assert is_let_in(db, device, "second", at)
    clock.forward(1)
    assert not is_let_in(db, device, "late", at)
    assert not is_let_in(db, device, "first", at)
    clock.forward(5 * 60)
    with db.write() as session:
        devices.purge_expired(session)
        assert session.query(DeviceNonce).count() == 0


def test_access_tokens_expire(db: Database, tenant_id: str, clock: Clock) -> None:
    device = enrol(db, invite(db, tenant_id)).device
    secret = token_of(db, device)
    clock.forward(3599)
    assert authenticated(db, secret) == device.id
    clock.forward(1)
    assert authenticated(db, secret) is None
    with db.write() as session:
        devices.purge_expired(session)
        assert session.query(DeviceToken).count() == 0


@pytest.mark.parametrize("leave", [devices.revoke, devices.unenrol])
def test_leaving_acts_on_the_next_request(db: Database, tenant_id: str, clock: Clock, leave: object) -> None:
    device = enrol(db, invite(db, tenant_id)).device
    secret = token_of(db, device)
    assert callable(leave)
    with db.write() as session:
        leave(session, tenant_id=tenant_id, device_id=device.id)
    assert authenticated(db, secret) is None
    assert not is_let_in(db, device, "nonce", clock.at)
    with db.read() as session:
        assert devices.find_active(session, device_id=device.id) is None


def test_a_revoked_key_stays_out_and_an_unenrolled_one_may_come_back(db: Database, tenant_id: str) -> None:
    code = invite(db, tenant_id)
    device = enrol(db, code).device
    with db.write() as session:
        devices.unenrol(session, tenant_id=tenant_id, device_id=device.id)
    with pytest.raises(InvitationError):
        enrol(db, code)
    back = enrol(db, invite(db, tenant_id))
    assert (back.device.id, back.created) == (device.id, True)
    with db.write() as session:
        devices.revoke(session, tenant_id=tenant_id, device_id=device.id)
    with pytest.raises(InvitationError):
        enrol(db, invite(db, tenant_id))


def test_what_a_device_held_when_it_left_stays_useless_once_it_is_back(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    device = enrol(db, invite(db, tenant_id)).device
    secret = token_of(db, device)
    for _ in range(2):  # the device leaves twice
        clock.forward(1)
        with db.write() as session:
            devices.unenrol(session, tenant_id=tenant_id, device_id=device.id)
    assert enrol(db, invite(db, tenant_id)).device.id == device.id
    assert authenticated(db, secret) is None
    assert not is_let_in(db, device, "nonce", clock.at)
    clock.forward(1)
    assert is_let_in(db, device, "nonce", clock.at)


def test_another_tenants_device_does_not_exist(db: Database, tenant_id: str, other_tenant_id: str) -> None:
    device = enrol(db, invite(db, tenant_id)).device
    with pytest.raises(NotFoundError), db.write() as session:
        devices.revoke(session, tenant_id=other_tenant_id, device_id=device.id)
    with db.read() as session:
        assert rows.list_all(session, Device, tenant_id=other_tenant_id).items == ()


def test_a_device_is_noted_with_the_version_that_it_was_told(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    device = enrol(db, invite(db, tenant_id)).device
    noted = []
    for version in (3, None):
        clock.forward(61)
        with db.write() as session:
            devices.touch(session, device_id=device.id, version=version)
        with db.read() as session:
            row = rows.get(session, Device, tenant_id=tenant_id, row_id=device.id)
        noted.append((row.last_seen_at, row.version))
    assert noted == [(clock.at - timedelta(seconds=61), 3), (clock.at, 3)]
