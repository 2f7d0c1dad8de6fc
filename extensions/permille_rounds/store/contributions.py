"""Invitations of devices to rounds, and their contributions. Contributions are kept until the round
ends.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.store import rows
from permille.store.database import now
from permille.store.errors import ContributionConflictError, NotFoundError, RoundClosedError
from permille.store.tables import Device, Federation, Participation, Round
from permille_rounds.contribution import RoundStart
from permille_rounds.schemas import FederationState, RoundState
from permille_rounds.store import charges, members, rounds

# Invite this many times the target, since not all devices will be in time.
INVITED_SHARE: Final = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The contribution of a device to a round."""

    federation_id: str
    number: int
    device_id: str
    data: bytes
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A contribution for the job that closes its round."""

    device_id: str
    public_key: str
    place: RoundStart
    data: bytes


def invite(session: Session, *, federation: Federation, device_id: str) -> tuple[Round, Participation] | None:
    """Invite a member to the open round. Return None if the member is not drawn or cannot take part.

    The draw compares a hash of round and device with a share. The share depends on the number of members that
    have privacy budget left. So asking again gives the same answer while this number does not change.

    Raises:
        NotFoundError: the device is not a member.
    """
    members.check(session, federation.id, device_id)
    if federation.state != FederationState.RUNNING:
        return None
    # The lock makes sure that the round does not close while the device is invited.
    row = rounds.lock(session, federation.id, federation.number)
    if row is None or row.state != RoundState.OPEN or now(session) >= row.deadline_at:
        return None
    if charges.is_spent(session, federation, device_id, besides=row.number):
        return None
    held = session.get(Participation, (row.federation_id, row.number, device_id))
    if held is None:
        if not _is_drawn(session, federation, row, device_id):
            return None
        held = rows.add(
            session,
            Participation(
                federation_id=row.federation_id,
                number=row.number,
                device_id=device_id,
                tenant_id=row.tenant_id,
                invited_at=now(session),
            ),
        )
    return row, held


def place_of(session: Session, *, federation: Federation, number: int, device_id: str) -> RoundStart:
    """Return the place of a member's contribution: the number of the round and the digest of its start state.

    Raises:
        NotFoundError: the device is not a member, or was not invited.
        RoundClosedError: the round has ended.
    """
    members.check(session, federation.id, device_id, lock=False)
    row = session.get(Round, (federation.id, number))
    held = session.get(Participation, (federation.id, number, device_id))
    if row is None or held is None:
        if number < federation.number:
            raise RoundClosedError(f"Round {number} has ended. Wait for the next one.")
        raise NotFoundError(f"There is no invitation to round {number}.")
    return RoundStart(round_number=number, start_digest=row.start_digest)


def accept(session: Session, *, federation: Federation, sent: Sent) -> tuple[bool, str | None]:
    """Store a contribution. Return whether it is new, and the job that closes the round if one was
    added.

    Raises:
        NotFoundError: the device is not a member, or was not invited.
        RoundClosedError: the round has its target, or its deadline has passed.
        ContributionConflictError: the device has sent another contribution to this round.
        BudgetSpentError: the device has taken part in all rounds that its budget allows.
    """
    members.check(session, sent.federation_id, sent.device_id)
    row = rounds.lock(session, sent.federation_id, sent.number)
    held = session.get(
        Participation, (sent.federation_id, sent.number, sent.device_id), populate_existing=True
    )
    if row is None or held is None:
        raise NotFoundError(f"There is no invitation to round {sent.number}.")
    # A device repeats its request if it did not get the answer, so the same contribution is no error.
    if held.digest == sent.digest:
        return False, None
    if row.state != RoundState.OPEN or now(session) >= row.deadline_at:
        raise RoundClosedError(f"Round {sent.number} takes no more contributions. Wait for the next one.")
    if held.digest is not None:
        raise ContributionConflictError(f"The device sent {held.digest} before, and now {sent.digest}.")
    charges.reserve(session, federation, number=row.number, device_id=sent.device_id)
    # The charge is already reserved, so the budget covers every contribution that is stored.
    held.digest, held.data = sent.digest, sent.data
    _, received_so_far = rounds.counts(session, row)
    return True, rounds.begin_closing(session, row) if received_so_far >= federation.target else None


def note_refusal(session: Session, *, federation_id: str, number: int, code: str) -> None:
    """Count a refused contribution by its error code, if the round is open."""
    row = rounds.lock(session, federation_id, number)
    if row is not None and row.state == RoundState.OPEN:
        before = row.refused.get(code, 0)
        row.refused = {**row.refused, code: (before if isinstance(before, int) else 0) + 1}


def received(session: Session, *, federation_id: str, number: int) -> Sequence[Received]:
    """Return the contributions to a closing round, in no particular order."""
    start_digest = session.get_one(Round, (federation_id, number)).start_digest
    query = (
        select(Participation, Device.public_key)
        .join(Device, Device.id == Participation.device_id)
        .where(
            Participation.federation_id == federation_id,
            Participation.number == number,
            Participation.data.is_not(None),
        )
    )
    return [
        Received(
            device_id=part.device_id,
            public_key=key,
            place=RoundStart(round_number=number, start_digest=start_digest),
            data=part.data or b"",
        )
        for part, key in session.execute(query)
    ]


def _is_drawn(session: Session, federation: Federation, row: Round, device_id: str) -> bool:
    # Only members with budget left can take part, so draw among them.
    able = charges.members_left(session, federation, besides=row.number)
    share = INVITED_SHARE * federation.target / max(1, able)
    drawn = hashlib.sha256(f"permille-draw-1\0{federation.chain}\0{row.number}\0{device_id}".encode())
    # Compare 48 bits of the hash, since a float holds a number of 48 bits exactly.
    return int.from_bytes(drawn.digest()[:6], "big") < share * 2**48
