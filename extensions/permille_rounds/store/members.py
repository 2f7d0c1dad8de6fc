"""Members of federations: devices whose owners let them join. When a device leaves, its contributions
to open rounds are deleted.
"""

from typing import cast

from sqlalchemy import and_, bindparam, func, or_, select, update
from sqlalchemy.orm import Session

from permille.store.database import now
from permille.store.errors import ConflictError, require
from permille.store.tables import Device, Federation, FederationMember, Participation, Round
from permille_rounds.schemas import FederationState, FederationSummary, RoundState
from permille_rounds.store import charges

_JOINABLE = (FederationState.RUNNING.value, FederationState.PAUSED.value)


_OFFERS = (
    select(
        *(getattr(Federation, name) for name in (*FederationSummary.model_fields, "target")),
        FederationMember.device_id,
    )
    .outerjoin(
        FederationMember,
        and_(
            FederationMember.federation_id == Federation.id,
            FederationMember.device_id == bindparam("device_id"),
            FederationMember.left_at.is_(None),
        ),
    )
    .where(
        Federation.tenant_id == bindparam("tenant_id"),
        Federation.release == bindparam("release"),
        or_(Federation.state.in_(_JOINABLE), FederationMember.device_id.is_not(None)),
    )
    .order_by(Federation.id)
)


def offers(
    session: Session, *, tenant_id: str, release: str, device_id: str
) -> list[tuple[Federation, bool]]:
    """Return the federations that a device may join or is a member of, oldest first.

    Each item has the columns of a federation's row, and whether the device is a member.
    """
    values = {"tenant_id": tenant_id, "release": release, "device_id": device_id}
    found = session.execute(_OFFERS, values)
    return [(cast(Federation, row), row.device_id is not None) for row in found]


def join(session: Session, *, federation: Federation, device_id: str) -> None:
    """Make a device a member. Idempotent. Raises ConflictError if the federation accepts no members
    now.
    """
    if federation.state not in _JOINABLE:
        raise ConflictError(f"The federation does not run: it is {federation.state}.")
    row = session.get(FederationMember, (federation.id, device_id), with_for_update={"key_share": True})
    if row is None:
        row = FederationMember(
            federation_id=federation.id,
            device_id=device_id,
            tenant_id=federation.tenant_id,
            joined_at=now(session),
        )
        session.add(row)
    elif row.left_at is not None:
        row.joined_at, row.left_at = now(session), None


def leave(session: Session, *, device_id: str, federation_id: str | None = None) -> None:
    """End the membership of a device in a federation, or in all federations if `federation_id` is None.
    Withdraw its contributions to open rounds. Idempotent.
    """
    query = select(FederationMember).where(
        FederationMember.device_id == device_id, FederationMember.left_at.is_(None)
    )
    if federation_id is not None:
        query = query.where(FederationMember.federation_id == federation_id)
    for row in session.scalars(
        query.order_by(FederationMember.federation_id).with_for_update(key_share=True)
    ):
        row.left_at = now(session)
        withdraw(session, federation_id=row.federation_id, device_id=device_id)


def count(session: Session, federation_id: str) -> int:
    """Count the members."""
    query = select(func.count()).where(
        FederationMember.federation_id == federation_id, FederationMember.left_at.is_(None)
    )
    return session.scalar(query) or 0


def check(session: Session, federation_id: str, device_id: str, *, lock: bool = True) -> None:
    """Check that an active device is a member, and lock the membership. Raises NotFoundError."""
    query = (
        select(FederationMember)
        .join(Device, Device.id == FederationMember.device_id)
        .where(
            FederationMember.federation_id == federation_id,
            FederationMember.device_id == device_id,
            FederationMember.left_at.is_(None),
            Device.revoked_at.is_(None),
            Device.unenrolled_at.is_(None),
        )
    )
    # A caller that only reads (`contributions.place_of`) takes no lock.
    if lock:
        query = query.with_for_update(key_share=True, of=FederationMember)
    member = session.scalar(query.execution_options(populate_existing=True))
    require(member, f"There is no membership of federation {federation_id!r}.")


def withdraw(session: Session, *, federation_id: str, device_id: str, number: int | None = None) -> None:
    """Delete a device's contribution to the open round. A round that is closing still counts it.

    Args:
        number: withdraw only if the open round has this number. None stands for any number.
    """
    # A round that is closing is not selected, because its job may have read the contribution already.
    query = select(Round).where(Round.federation_id == federation_id, Round.state == RoundState.OPEN.value)
    if number is not None:
        query = query.where(Round.number == number)
    for row in session.scalars(
        query.with_for_update(key_share=True).execution_options(populate_existing=True)
    ):
        own = (
            Participation.federation_id == row.federation_id,
            Participation.number == row.number,
            Participation.device_id == device_id,
        )
        session.execute(update(Participation).where(*own).values(digest=None, data=None))
        charges.release(session, federation_id=federation_id, number=row.number, device_id=device_id)
