"""Rounds as a state machine: open -> closing -> published or void.

A round is open until enough devices have sent something, or its deadline: then a job closes it, added in the
transaction that says so. Every change of a round, and every contribution to it, locks its row first. What
devices sent is read by the job, and forgotten in the transaction that publishes what became of it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.orm import Session

from permille.federation.contribution import Place
from permille.schemas.federations import FederationState, RoundState
from permille.schemas.jobs import JobKind
from permille.store.database import Database, now
from permille.store.errors import ContributionConflictError, NotFoundError, RoundClosedError
from permille.store.federations import members
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from permille.store.tables import Checkpoint, Device, Federation, Participation, Round

INVITED_SHARE: Final = 1.3
"""So many times the target are invited: not all will be in time."""
_ATTEMPTS: Final = 20
_KEPT_CHECKPOINTS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a device has sent to a round."""

    federation_id: str
    number: int
    device_id: str
    data: bytes
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A contribution as the job that closes its round gets it."""

    device_id: str
    public_key: str
    place: Place
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of a round.

    Attributes:
        record: its bytes (FORMAT 13.3).
        reason: why it is void; None where it is published.
        chain, state_digest, reach, state: where the federation then stands; the state is packed.
        gains: mean and standard error, in nats a token, of what the devices measured; None: of too few.
    """

    record: bytes
    reason: str | None
    counted: int
    chain: str
    state_digest: str
    reach: int
    state: bytes
    gains: tuple[float, float] | None


def lock(session: Session, federation_id: str, number: int) -> Round | None:
    """Read a round for change, as it is now."""
    query = select(Round).where(Round.federation_id == federation_id, Round.number == number)
    return session.scalar(query.with_for_update().execution_options(populate_existing=True))


def open_next(session: Session, federation: Federation) -> None:
    """Open the next round of a locked federation that runs; it ends after its last one."""
    if federation.state != FederationState.RUNNING:
        return
    if federation.number >= federation.rounds:
        federation.state = FederationState.FINISHED.value
        return
    if session.get(Round, (federation.id, federation.number)) is not None:  # open since before a pause
        return
    at = now(session)
    row = Round(
        federation_id=federation.id,
        number=federation.number,
        tenant_id=federation.tenant_id,
        state=RoundState.OPEN.value,
        start_digest=federation.state_digest,
        opened_at=at,
        deadline_at=at + timedelta(seconds=federation.deadline_s),
        refused={},
    )
    session.add(row)
    session.flush()


def advance(session: Session, federation: Federation, row: Round) -> str | None:
    """Close a locked round where it is time to; return the job that does it.

    A round whose deadline finds that nobody was there to be invited goes on.
    """
    if row.state != RoundState.OPEN:
        return None
    at = now(session)
    invited, sent = _counts(session, row)
    finished = federation.state == FederationState.FINISHED
    if sent < federation.target and at < row.deadline_at and not finished:
        return None
    if not invited and not finished:
        row.deadline_at = at + timedelta(seconds=federation.deadline_s)
        return None
    new = NewJob(
        tenant_id=row.tenant_id,
        kind=JobKind.ROUND,
        payload={"federation_id": row.federation_id, "number": row.number},
        max_attempts=_ATTEMPTS,
    )
    row.state = RoundState.CLOSING.value
    row.job_id = queue.submit(session, new).id
    session.flush()
    return row.job_id


def sweep(db: Database) -> int:
    """Close the rounds whose deadline has passed, one short transaction each; return how many."""
    with db.read() as session:
        due = session.execute(
            select(Round.federation_id, Round.number).where(
                Round.state == RoundState.OPEN.value, Round.deadline_at <= now(session)
            )
        ).all()
    closed = 0
    for federation_id, number in due:
        with db.write() as session:
            federation, row = session.get(Federation, federation_id), lock(session, federation_id, number)
            if federation is not None and row is not None and advance(session, federation, row) is not None:
                closed += 1
    return closed


def invite(
    session: Session, *, federation: Federation, device_id: str, lanes: int
) -> tuple[Round, Participation] | None:
    """Invite a member to the open round, or not: drawn once a device and round, the answer stays.

    Raises NotFoundError where the device is no member.
    """
    members.check(session, federation.id, device_id)
    if federation.state != FederationState.RUNNING:
        return None
    row = lock(session, federation.id, federation.number)
    if row is None or row.state != RoundState.OPEN or now(session) >= row.deadline_at:
        return None
    held = session.get(Participation, (row.federation_id, row.number, device_id))
    if held is None:
        if not _is_drawn(session, federation, row, device_id):
            return None
        invited, _ = _counts(session, row)
        held = Participation(
            federation_id=row.federation_id,
            number=row.number,
            device_id=device_id,
            tenant_id=row.tenant_id,
            lane=invited % lanes,
            invited_at=now(session),
        )
        session.add(held)
        session.flush()
    return row, held


def place_of(session: Session, *, federation: Federation, number: int, device_id: str) -> Place:
    """What a member was invited to. Raises NotFoundError: it is no member, or was not; RoundClosedError."""
    members.check(session, federation.id, device_id, lock=False)
    row = session.get(Round, (federation.id, number))
    held = session.get(Participation, (federation.id, number, device_id))
    if row is None or held is None:
        if number < federation.number:
            raise RoundClosedError(f"expected one to round {federation.number}, got one to {number}")
        raise NotFoundError(f"no invitation to round {number}")
    return Place(round_number=number, lane=held.lane, start_digest=row.start_digest)


def accept(session: Session, *, federation: Federation, sent: Sent) -> tuple[bool, str | None]:
    """Keep a contribution; return whether it is new, and the job that closes the round, if one was added.

    Raises:
        NotFoundError: the device is no member, or was not invited.
        RoundClosedError: it comes too late.
        ContributionConflictError: the device has sent other bytes.
    """
    members.check(session, sent.federation_id, sent.device_id)
    row = lock(session, sent.federation_id, sent.number)
    held = session.get(
        Participation, (sent.federation_id, sent.number, sent.device_id), populate_existing=True
    )
    if row is None or held is None:
        raise NotFoundError(f"no invitation to round {sent.number}")
    if held.digest == sent.digest:
        return False, None
    if row.state != RoundState.OPEN or now(session) >= row.deadline_at:
        raise RoundClosedError(f"expected a contribution to round {sent.number} by {row.deadline_at:%F %T}")
    if held.digest is not None:
        raise ContributionConflictError(f"expected {held.digest} as sent before, got {sent.digest}")
    held.digest, held.data = sent.digest, sent.data
    session.flush()
    return True, advance(session, federation, row)


def note_refusal(session: Session, *, federation_id: str, number: int, code: str) -> None:
    """Count a contribution that was refused, by its code; nothing where there is no such round."""
    row = lock(session, federation_id, number)
    if row is not None and row.state == RoundState.OPEN:
        before = row.refused.get(code, 0)
        row.refused = {**row.refused, code: (before if isinstance(before, int) else 0) + 1}


def received(session: Session, *, federation_id: str, number: int) -> Sequence[Received]:
    """What devices have sent to a round that is closing, in no particular order."""
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
            place=Place(round_number=number, lane=part.lane, start_digest=start_digest),
            data=part.data or b"",
        )
        for part, key in session.execute(query)
    ]


def publish(session: Session, *, federation: Federation, number: int, ended: Ended) -> None:
    """Write what became of the closing round of a locked federation, and open the next one.

    Raises NotFoundError where that round is not closing: it has ended before.
    """
    row = lock(session, federation.id, number)
    if row is None or row.state != RoundState.CLOSING or federation.number != number:
        raise NotFoundError(f"no closing round {number} of {federation.id}")
    row.invited, row.received = _counts(session, row)
    row.state = (RoundState.PUBLISHED if ended.reason is None else RoundState.VOID).value
    row.closed_at, row.reason, row.record, row.counted = (
        now(session),
        ended.reason,
        ended.record,
        ended.counted,
    )
    row.chain, row.state_digest, row.reach = ended.chain, ended.state_digest, ended.reach
    if ended.gains is not None:
        row.gain_mean, row.gain_error = ended.gains
    session.execute(update(Participation).where(*_of(row)).values(data=None))
    session.execute(
        delete(Participation).where(
            Participation.federation_id == federation.id, Participation.number < number
        )
    )
    federation.number = number + 1
    federation.chain, federation.state_digest, federation.reach = ended.chain, ended.state_digest, ended.reach
    if ended.reason is None:
        _keep_checkpoint(session, federation, ended.state)
    open_next(session, federation)
    session.flush()


def live_counts(session: Session, row: Round) -> tuple[int, int]:
    """How many devices were invited to a round, and how many have sent something."""
    if row.invited is not None and row.received is not None:
        return row.invited, row.received
    return _counts(session, row)


def _keep_checkpoint(session: Session, federation: Federation, state: bytes) -> None:
    """Add the newest checkpoint; of older ones the adopted and those after 1, 2, 4, 8 ... rounds stay."""
    numbers = session.scalars(
        select(Checkpoint.number)
        .where(Checkpoint.federation_id == federation.id)
        .order_by(Checkpoint.number.desc())
    ).all()
    old = [
        number
        for number in numbers[_KEPT_CHECKPOINTS - 1 :]
        if number & (number - 1) and number != federation.adopted_round
    ]
    session.execute(
        delete(Checkpoint).where(Checkpoint.federation_id == federation.id, Checkpoint.number.in_(old))
    )
    session.add(
        Checkpoint(
            federation_id=federation.id, number=federation.number, tenant_id=federation.tenant_id, state=state
        )
    )


def _is_drawn(session: Session, federation: Federation, row: Round, device_id: str) -> bool:
    share = INVITED_SHARE * federation.target / max(1, members.count(session, federation.id))
    drawn = hashlib.sha256(f"permille-draw-1\0{federation.chain}\0{row.number}\0{device_id}".encode())
    return int.from_bytes(drawn.digest()[:6], "big") < share * 2**48


def _of(row: Round) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return Participation.federation_id == row.federation_id, Participation.number == row.number


def _counts(session: Session, row: Round) -> tuple[int, int]:
    query = select(func.count(), func.count(Participation.digest)).where(*_of(row))
    invited, sent = session.execute(query).one()
    return invited, sent
