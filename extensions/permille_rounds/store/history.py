"""The history of a federation as rows, for the job of the next round and for devices that catch up."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from permille.store.errors import NotFoundError, require
from permille.store.rows import Page, Window, fetch_page
from permille.store.tables import Federation, FederationCheckpoint, Round
from permille_rounds.rounds import Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to compute a state of a federation.

    Attributes:
        checkpoint: the packed state to start from, with its head. None means that the receiver has the state
            to start from.
        records: the records of the rounds after the start, to apply in this order.
        head: the head of the resulting state: its number of rounds and its digests.
    """

    checkpoint: tuple[bytes, Head] | None
    records: Sequence[bytes]
    head: Head


def way_to(session: Session, federation: Federation, *, after: int, until: int) -> Way:
    """Return a way between two states. `after` and `until` are their numbers of rounds.

    It is either the records of all rounds between the states, or the newest checkpoint between them and the
    records after it. The way with fewer bytes is chosen.

    Raises:
        NotFoundError: fewer than `until` rounds are done, or `after` is larger than `until`.
    """
    if not after <= until <= federation.number:
        raise NotFoundError(
            f"There is no history from {after} to {until} rounds: `until` may be at most {federation.number} "
            "(the rounds that are done), and `after` at most `until`."
        )
    query = select(FederationCheckpoint.number, func.length(FederationCheckpoint.state)).where(
        FederationCheckpoint.federation_id == federation.id,
        FederationCheckpoint.number > after,
        FederationCheckpoint.number <= until,
    )
    newest = session.execute(query.order_by(FederationCheckpoint.number.desc()).limit(1)).first()
    begin = after
    # A checkpoint replaces the records before it. Use the checkpoint if it is smaller than these records.
    if newest is not None and newest[1] < _record_bytes(session, federation, after, newest[0]):
        begin = newest[0]
    return _way(session, federation, begin, until, has_state=begin == after)


def newest_way(session: Session, federation: Federation) -> Way:
    """Return the way from the newest checkpoint to the current state."""
    query = select(func.max(FederationCheckpoint.number))
    begin = session.scalar(query.where(FederationCheckpoint.federation_id == federation.id)) or 0
    return _way(session, federation, begin, federation.number, has_state=begin == 0)


def _way(session: Session, federation: Federation, begin: int, until: int, *, has_state: bool) -> Way:
    """Return the way from the state after `begin` rounds to the state after `until` rounds. Unless the
    receiver has the first state, add its checkpoint.
    """
    checkpoint = None
    if not has_state:
        state = session.get_one(FederationCheckpoint, (federation.id, begin)).state
        checkpoint = (state, head_at(session, federation, begin))
    query = select(Round.record).where(*_between(federation, begin, until)).order_by(Round.number)
    return Way(
        checkpoint=checkpoint,
        records=[record for record in session.scalars(query) if record is not None],
        head=head_at(session, federation, until),
    )


def get_round(session: Session, federation: Federation, number: int) -> Round:
    """Read one round. Raises NotFoundError."""
    row = session.get(Round, (federation.id, number)) if number <= federation.number else None
    return require(row, f"There is no round {number}.")


def list_rounds(session: Session, federation: Federation, window: Window) -> Page[Round]:
    """List rounds, newest first. Raises InputError for a cursor that no page returned."""
    query = select(Round).where(Round.federation_id == federation.id)
    return fetch_page(session, query, window, Round.number)


def newest_measured(session: Session, federation: Federation) -> int | None:
    """Return the number of the newest round in which devices measured the gain of the round's start state.
    Return None if there is no such round.
    """
    query = select(func.max(Round.number)).where(
        Round.federation_id == federation.id, Round.gain_mean.is_not(None)
    )
    return session.scalar(query)


def head_at(session: Session, federation: Federation, number: int) -> Head:
    """Return the federation's head after `number` rounds, with the digests of its history and its state."""
    if number == 0:
        first = session.get(Round, (federation.id, 0))
        return Head(
            definition_digest=federation.definition_digest,
            number=0,
            reach=0,
            chain=federation.definition_digest,
            state_digest=federation.state_digest if first is None else first.start_digest,
        )
    is_newest = number == federation.number
    at = federation if is_newest else session.get_one(Round, (federation.id, number - 1))
    return Head(
        definition_digest=federation.definition_digest,
        number=number,
        reach=at.reach or 0,
        chain=at.chain or "",
        state_digest=at.state_digest or "",
    )


def _record_bytes(session: Session, federation: Federation, begin: int, end: int) -> int:
    query = select(func.sum(func.length(Round.record))).where(*_between(federation, begin, end))
    return session.scalar(query) or 0


def _between(federation: Federation, begin: int, end: int) -> tuple[ColumnElement[bool], ...]:
    return Round.federation_id == federation.id, Round.number >= begin, Round.number < end
