"""The privacy ledger: each device is charged once for every round whose sum includes its contribution.

An accepted contribution reserves a charge. When the round ends, the charge is spent if a job was started to
close the round, because that job or a keeper may have computed a sum. This holds even if the round is void
in the end. The charge is released only if no sum can include the contribution: too few contributions came,
or the device withdrew. A charge changes in the same transaction as the contribution or the round, so a retry
cannot charge twice.
"""

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from permille.store.errors import BudgetSpentError
from permille.store.tables import Federation, FederationMember, PrivacyCharge, Round
from permille_rounds.schemas import ChargeState

# A reserved charge counts, too: its round may still spend it.
_COUNTED = (ChargeState.RESERVED.value, ChargeState.SPENT.value)


def members_left(session: Session, federation: Federation, *, besides: int) -> int:
    """Count the members whose privacy budget is not spent, without regard to their charges for round
    `besides`.
    """
    members = select(func.count()).where(
        FederationMember.federation_id == federation.id, FederationMember.left_at.is_(None)
    )
    if federation.participations is not None:
        spent = (
            select(PrivacyCharge.device_id)
            .where(
                PrivacyCharge.federation_id == federation.id,
                PrivacyCharge.number != besides,
                PrivacyCharge.state.in_(_COUNTED),
            )
            .group_by(PrivacyCharge.device_id)
            .having(func.count() >= federation.participations)
        )
        # With a NULL in the list, NOT IN would select no member. `device_id` is a part of the key, so it is
        # never NULL.
        members = members.where(FederationMember.device_id.not_in(spent))
    return session.scalar(members) or 0


def is_spent(session: Session, federation: Federation, device_id: str, *, besides: int) -> bool:
    """Return whether a device's privacy budget is spent, without regard to its charge for round
    `besides`.
    """
    if federation.participations is None:
        return False
    query = select(func.count()).where(
        PrivacyCharge.federation_id == federation.id,
        PrivacyCharge.device_id == device_id,
        PrivacyCharge.number != besides,
        PrivacyCharge.state.in_(_COUNTED),
    )
    return (session.scalar(query) or 0) >= federation.participations


def reserve(session: Session, federation: Federation, *, number: int, device_id: str) -> None:
    """Charge a device for the open round, whose row is locked. Do nothing without differential privacy.

    Raises:
        BudgetSpentError: the device has taken part in all rounds that its budget allows.
    """
    if federation.participations is None:
        return
    row = session.get(PrivacyCharge, (federation.id, number, device_id), populate_existing=True)
    if row is not None and row.state in _COUNTED:
        return
    if is_spent(session, federation, device_id, besides=number):
        raise BudgetSpentError(
            f"The device has taken part in {federation.participations} rounds, as many as its privacy budget "
            "allows."
        )
    if row is None:
        row = PrivacyCharge(
            federation_id=federation.id, number=number, device_id=device_id, tenant_id=federation.tenant_id
        )
        session.add(row)
    row.state = ChargeState.RESERVED.value


def release(session: Session, *, federation_id: str, number: int, device_id: str) -> None:
    """Release the charge of a device that withdraws from the open round."""
    _move(session, federation_id, number, ChargeState.RELEASED, PrivacyCharge.device_id == device_id)


def settle(session: Session, row: Round) -> None:
    """Settle the reserved charges of a locked round that ends: spend the charges if the round has a job, and
    release them otherwise.
    """
    # If the round has a job, the job or a keeper may have computed a sum, even if the round is void in the
    # end.
    state = ChargeState.RELEASED if row.job_id is None else ChargeState.SPENT
    _move(session, row.federation_id, row.number, state)


def distribution(session: Session, federation_id: str) -> dict[int, int]:
    """Count the devices by the number of rounds for which they were charged."""
    per_device = (
        select(func.count().label("rounds"))
        .where(PrivacyCharge.federation_id == federation_id, PrivacyCharge.state.in_(_COUNTED))
        .group_by(PrivacyCharge.device_id)
        .subquery()
    )
    query = select(per_device.c.rounds, func.count()).group_by(per_device.c.rounds)
    return {row.rounds: row[1] for row in session.execute(query.order_by(per_device.c.rounds))}


def _move(
    session: Session, federation_id: str, number: int, state: ChargeState, *whose: ColumnElement[bool]
) -> None:
    session.execute(
        update(PrivacyCharge)
        .where(
            PrivacyCharge.federation_id == federation_id,
            PrivacyCharge.number == number,
            PrivacyCharge.state == ChargeState.RESERVED.value,
            *whose,
        )
        .values(state=state.value)
    )
