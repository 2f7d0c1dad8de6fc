"""Create, start, pause and finish federations."""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.store import rows
from permille.store.database import now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.ids import Prefix, new_id
from permille.store.tables import Federation, Release
from permille_rounds.definition import Definition
from permille_rounds.rounds import History
from permille_rounds.schemas import FederationState
from permille_rounds.store import rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFederation:
    """A federation to store."""

    name: str
    definition: Definition
    target: int
    deadline_s: int


def add(session: Session, *, release: Release, new: NewFederation) -> Federation:
    """Add a federation on a release, in state `draft`. Raises ConflictError if the name is taken."""
    query = select(Federation.id).where(
        Federation.tenant_id == release.tenant_id, Federation.name == new.name
    )
    if session.scalar(query) is not None:
        raise ConflictError(f"The name {new.name!r} is taken. Choose another one.")
    begin = History.begin(new.definition)
    return rows.add(
        session,
        Federation(
            id=new_id(Prefix.FEDERATION),
            tenant_id=release.tenant_id,
            created_at=now(session),
            name=new.name,
            release=release.name,
            version=release.version,
            package_digest=release.package_digest,
            definition=new.definition.to_bytes(),
            definition_digest=new.definition.digest,
            state=FederationState.DRAFT.value,
            target=new.target,
            minimum=new.definition.minimum,
            deadline_s=new.deadline_s,
            rounds=new.definition.rounds,
            number=0,
            chain=begin.chain,
            state_digest=begin.digest,
            reach=0,
            participations=None if new.definition.privacy is None else new.definition.privacy.participations,
        ),
    )


def start(session: Session, federation: Federation) -> None:
    """Start a draft or continue a paused federation, and open its next round. The row must be locked.
    Idempotent.

    Raises:
        ConflictError: the federation is finished.
    """
    if federation.state == FederationState.FINISHED:
        raise ConflictError("The federation is finished. Make another one.")
    federation.state = FederationState.RUNNING.value
    rounds.open_next(session, federation)


def pause(federation: Federation) -> None:
    """Pause a locked federation: invite no further devices and open no further rounds. Idempotent.

    Raises:
        ConflictError: the federation is a draft or finished.
    """
    if federation.state not in (FederationState.RUNNING, FederationState.PAUSED):
        raise ConflictError(f"The federation does not run: it is {federation.state}.")
    federation.state = FederationState.PAUSED.value


def finish(session: Session, federation: Federation) -> str | None:
    """End a locked federation for good. Its open round ends with the contributions that have arrived.
    Idempotent.

    Returns:
        The id of the job that closes the round, or None.
    """
    federation.state = FederationState.FINISHED.value
    row = rounds.lock(session, federation.id, federation.number)
    return None if row is None else rounds.end(session, federation, row)


def for_device(session: Session, *, tenant_id: str, release: str, federation_id: str) -> Federation:
    """Read a federation for a device that follows `release`. Raises NotFoundError for drafts and for
    federations of other releases.
    """
    row = rows.get(session, Federation, tenant_id=tenant_id, row_id=federation_id)
    if row.release != release or row.state == FederationState.DRAFT:
        raise NotFoundError(f"There is no federation {federation_id!r}.")
    return row
