"""Rounds as a state machine: open -> closing -> published or void.

A round is open until enough devices have contributed, or until its deadline. Then a job closes it.
The transaction that ends the open state adds this job. If the job drops so many contributions that too few
are left, the round opens again. A round with too few contributions becomes void without a job. Every change
of a round, and every contribution to it, first locks the round's row. The job reads the contributions, and
the transaction that publishes the result deletes them.

`permille.store.database` defines the order of locks: job, federation, member, round. The locks do
not block inserts that refer to these rows (FOR NO KEY UPDATE in PostgreSQL).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from sqlalchemy import BigInteger, ColumnElement, delete, func, literal, or_, select, type_coerce, update
from sqlalchemy.orm import Session

from permille.schemas.jobs import JobKind, JobState
from permille.store import rows
from permille.store.database import Database, now, run_each
from permille.store.errors import NotFoundError
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from permille.store.tables import Federation, FederationCheckpoint, Instant, Job, Participation, Round
from permille_rounds.definition import Definition
from permille_rounds.rounds import chain_after, void_round
from permille_rounds.schemas import FederationState, RoundState
from permille_rounds.store import charges, members

# The number of attempts of the job that closes a round. A lost round wastes the work and the privacy budget
# of many devices, so try often.
_ATTEMPTS: Final = 20
_WITHOUT_RESULT: Final = (JobState.FAILED.value, JobState.DEAD.value, JobState.CANCELLED.value)
_KEPT_CHECKPOINTS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Result of a round.

    Attributes:
        record: the bytes of the round's record (FORMAT 13.3).
        counted: the number of devices whose contributions entered the sum.
        state_digest: the digest of the federation's new state.
        reach: the bound on the elements of the new state (FORMAT 7.3).
        state: the new state, packed.
        gains: the mean of the gains that devices measured, and its standard error, in nats per token.
            None if too few devices measured.
    """

    record: bytes
    counted: int
    state_digest: str
    reach: int
    state: bytes
    gains: tuple[float, float] | None


def lock(session: Session, federation_id: str, number: int) -> Round | None:
    """Lock a round and read it as it is now."""
    key, in_turn = (federation_id, number), {"key_share": True}
    return session.get(Round, key, with_for_update=in_turn, populate_existing=True)


def counts(session: Session, row: Round) -> tuple[int, int]:
    """Return the number of invited devices and the number of contributions."""
    if row.invited is not None and row.received is not None:
        return row.invited, row.received
    # A contribution that was dropped keeps its digest, but has no data.
    query = select(func.count(), func.count(Participation.data)).where(*_of(row))
    invited, sent = session.execute(query).one()
    return invited, sent


def open_next(session: Session, federation: Federation) -> None:
    """Open the next round of a locked, running federation. After the last round, finish the
    federation.
    """
    if federation.state != FederationState.RUNNING:
        return
    if federation.number >= federation.rounds:
        federation.state = FederationState.FINISHED.value
        return
    if session.get(Round, (federation.id, federation.number)) is not None:  # it was opened before a pause
        return
    at = now(session)
    rows.add(
        session,
        Round(
            federation_id=federation.id,
            number=federation.number,
            tenant_id=federation.tenant_id,
            state=RoundState.OPEN.value,
            start_digest=federation.state_digest,
            opened_at=at,
            deadline_at=at + timedelta(seconds=federation.deadline_s),
            refused={},
            dropped={},
        ),
    )


def end(session: Session, federation: Federation, row: Round) -> str | None:
    """End an open round with the contributions that came. Round and federation must be locked.

    If there are too few contributions, the round is void at once. If no device was invited, the
    deadline is postponed. If, in addition, all members have spent their privacy budgets, the federation
    pauses.

    Returns:
        The id of the job that closes the round, or None.
    """
    if row.state != RoundState.OPEN:
        return None
    invited, sent = counts(session, row)
    # Devices poll rarely. If none was invited yet, nothing is lost if the round waits.
    if not invited and federation.state != FederationState.FINISHED:
        row.deadline_at = now(session) + timedelta(seconds=federation.deadline_s)
        if _all_spent(session, federation, row):
            federation.state = FederationState.PAUSED.value
        return None
    if sent < federation.minimum:
        void(session, federation, row, f"{sent} contributions came, fewer than {federation.minimum}")
        return None
    return begin_closing(session, row)


def _all_spent(session: Session, federation: Federation, row: Round) -> bool:
    if federation.participations is None or federation.state != FederationState.RUNNING:
        return False
    left = charges.members_left(session, federation, besides=row.number)
    return not left and members.count(session, federation.id) > 0


def sweep(db: Database) -> None:
    """End the rounds whose deadline has passed, and the rounds whose job ended without a result.

    Each round is handled in a short transaction of its own. If one fails, the others still run. If its job
    has the state `failed`, the federation pauses, since an operator must look for the cause.
    """
    with db.read() as session:
        due = session.execute(
            select(Round.tenant_id, Round.federation_id, Round.number)
            .join(Federation, Federation.id == Round.federation_id)
            .where(
                Round.state == RoundState.OPEN.value,
                or_(Round.deadline_at <= (at := now(session)), _is_misdated(at)),
            )
        ).all()
        stuck = session.execute(
            select(Round.tenant_id, Round.federation_id, Round.number, Job.id)
            .join(Job, Job.id == Round.job_id)
            .where(Round.state == RoundState.CLOSING.value, Job.state.in_(_WITHOUT_RESULT))
        ).all()
    run_each([partial(_end_due, db, *key) for key in due] + [partial(_void_stuck, db, *key) for key in stuck])


def _end_due(db: Database, tenant_id: str, federation_id: str, number: int) -> None:
    with db.write() as session:
        federation = rows.lock(session, Federation, tenant_id=tenant_id, row_id=federation_id)
        row, at = lock(session, federation_id, number), now(session)
        if row is not None and row.deadline_at <= at:
            end(session, federation, row)
        elif row is not None and row.state == RoundState.OPEN:
            # The database's clock has gone back. Do not wait longer than a round that is opened now.
            row.deadline_at = min(row.deadline_at, at + timedelta(seconds=federation.deadline_s))


def _void_stuck(db: Database, tenant_id: str, federation_id: str, number: int, job_id: str) -> None:
    with db.write() as session:
        job = queue.lock(session, tenant_id=tenant_id, job_id=job_id)
        federation = rows.lock(session, Federation, tenant_id=tenant_id, row_id=federation_id)
        row = lock(session, federation_id, number)
        is_closing = row is not None and row.state == RoundState.CLOSING
        if row is not None and is_closing and job.state in _WITHOUT_RESULT:
            error = (job.error or {}).get("message", "no error")
            if job.state == JobState.FAILED and federation.state == FederationState.RUNNING:
                # The next round would fail for the same reason, and devices would be charged for it.
                federation.state = FederationState.PAUSED.value
            void(session, federation, row, f"{job.id} is {job.state}: {error}")


def _is_misdated(at: datetime) -> ColumnElement[bool]:
    """Select rounds that have more time left than a new round has, because the database's clock has gone
    back.
    """
    left = type_coerce(Round.deadline_at, BigInteger) - literal(at, Instant())
    return left > Federation.deadline_s * literal(1_000_000, BigInteger)


def publish(session: Session, *, federation: Federation, number: int, ended: Ended) -> None:
    """Store the result of the closing round of a locked federation, and open the next round.

    Raises:
        NotFoundError: the round is not closing, so it has ended before.
    """
    row = lock_closing(session, federation, number)
    row.state, row.counted = RoundState.PUBLISHED.value, ended.counted
    federation.state_digest, federation.reach = ended.state_digest, ended.reach
    if ended.gains is not None:
        row.gain_mean, row.gain_error = ended.gains
    _finish(session, federation, row, ended.record)
    _keep_checkpoint(session, federation, ended.state)
    open_next(session, federation)


def void(session: Session, federation: Federation, row: Round, reason: str) -> None:
    """Make a round void, and open the next one. Round and federation must be locked."""
    definition = Definition.from_bytes(federation.definition)
    row.state, row.counted, row.reason = RoundState.VOID.value, 0, reason
    _finish(session, federation, row, void_round(definition, row.number).to_bytes())
    open_next(session, federation)


def drop(session: Session, row: Round, dropped: Mapping[str, str]) -> None:
    """Leave out the contributions of these devices from a locked round, and record the error codes.

    The devices stay charged, so each can do this only as often as its budget allows.
    """
    if not dropped:
        return
    row.dropped = {**row.dropped, **dropped}
    key = {"federation_id": row.federation_id, "number": row.number, "data": None}
    # One statement with all ids could exceed the database's limit of parameters.
    session.execute(update(Participation), [key | {"device_id": device_id} for device_id in dropped])


def reopen(session: Session, federation: Federation, row: Round) -> None:
    """Open a locked closing round again, because too few contributions are left. Nobody has seen a sum.

    The sweeper ends the round at its deadline. The round of a finished federation ends at once.
    """
    # Without a job, a void round releases the charges.
    row.state, row.job_id = RoundState.OPEN.value, None
    if federation.state == FederationState.FINISHED:
        end(session, federation, row)


def lock_closing(session: Session, federation: Federation, number: int) -> Round:
    """Lock the closing round of a locked federation. Raises NotFoundError."""
    row = lock(session, federation.id, number)
    if row is None or row.state != RoundState.CLOSING or federation.number != number:
        raise NotFoundError(f"There is no closing round {number} of {federation.id}.")
    return row


def _finish(session: Session, federation: Federation, row: Round, record: bytes) -> None:
    """Add a round's record to the chain, settle its charges, and delete its contributions."""
    row.invited, row.received = counts(session, row)
    row.closed_at, row.record = now(session), record
    charges.settle(session, row)
    session.execute(update(Participation).where(*_of(row)).values(data=None))
    # The digests of this round's contributions stay until the next round ends, so that a repeated
    # contribution is recognized.
    session.execute(
        delete(Participation).where(
            Participation.federation_id == federation.id, Participation.number < row.number
        )
    )
    # The chain covers the digest of the new state (FORMAT 13.4), which `federation` has already.
    federation.number = row.number + 1
    federation.chain = chain_after(federation.chain, record, federation.state_digest)
    row.chain, row.state_digest, row.reach = federation.chain, federation.state_digest, federation.reach


def begin_closing(session: Session, row: Round) -> str:
    """Add the job that closes a locked open round. Return its id."""
    new = NewJob(
        tenant_id=row.tenant_id,
        kind=JobKind.ROUND,
        payload={"federation_id": row.federation_id, "number": row.number},
        max_attempts=_ATTEMPTS,
    )
    job_id = queue.submit(session, new).id
    # The round begins to close in the transaction that adds the job, so a closing round always has a job.
    row.state, row.job_id = RoundState.CLOSING.value, job_id
    return job_id


def _keep_checkpoint(session: Session, federation: Federation, state: bytes) -> None:
    """Add a checkpoint, and delete the older ones that are not needed.

    Three kinds of older checkpoints are kept: the newest, the adopted one, and those after 1, 2, 4, 8 ...
    rounds.
    """
    numbers = session.scalars(
        select(FederationCheckpoint.number)
        .where(FederationCheckpoint.federation_id == federation.id)
        .order_by(FederationCheckpoint.number.desc())
    ).all()
    old = [
        number
        for number in numbers[_KEPT_CHECKPOINTS - 1 :]
        # `number & (number - 1)` is 0 for powers of two.
        if number & (number - 1) and number != federation.adopted_round
    ]
    session.execute(
        delete(FederationCheckpoint).where(
            FederationCheckpoint.federation_id == federation.id, FederationCheckpoint.number.in_(old)
        )
    )
    session.add(
        FederationCheckpoint(
            federation_id=federation.id, number=federation.number, tenant_id=federation.tenant_id, state=state
        )
    )


def _of(row: Round) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return Participation.federation_id == row.federation_id, Participation.number == row.number
