"""The ledger of privacy: which rounds a device's integers went into, each charged once and never forgotten.

A contribution that is accepted reserves its round's charge; a sum that was made spends it, whether the round
is then published or void. Only where no sum was made, too few came or the device took its part back, is a
charge released. All of it happens in the transactions that accept, publish and void: no retry charges twice.
"""

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from permille.schemas.federations import ChargeState
from permille.store.errors import BudgetSpentError
from permille.store.tables import Federation, FederationMember, PrivacyCharge, Round

_COUNTED = (ChargeState.RESERVED.value, ChargeState.SPENT.value)


def members_left(session: Session, federation: Federation, *, besides: int) -> int:
    """Count the members that can still take part in a round, without their charge for `besides`."""
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
        members = members.where(FederationMember.device_id.not_in(spent))
    return session.scalar(members) or 0


def is_spent(session: Session, federation: Federation, device_id: str, *, besides: int) -> bool:
    """Return whether a device's budget is spent, without its charge for the round `besides`."""
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
    """Charge a device for the open round, whose row is locked; nothing where nobody is promised privacy.

    Raises BudgetSpentError: it has taken part as often as it was promised.
    """
    if federation.participations is None:
        return
    row = session.get(PrivacyCharge, (federation.id, number, device_id), populate_existing=True)
    if row is not None and row.state in _COUNTED:
        return
    if is_spent(session, federation, device_id, besides=number):
        raise BudgetSpentError(
            f"The device has taken part in all {federation.participations} rounds that were promised."
        )
    if row is None:
        row = PrivacyCharge(
            federation_id=federation.id, number=number, device_id=device_id, tenant_id=federation.tenant_id
        )
        session.add(row)
    row.state = ChargeState.RESERVED.value


def release(session: Session, *, federation_id: str, number: int, device_id: str) -> None:
    """Take back the charge of a device that takes its part of the open round back."""
    _move(session, federation_id, number, ChargeState.RELEASED, PrivacyCharge.device_id == device_id)


def settle(session: Session, row: Round) -> None:
    """End the charges of a locked round that ends: spent, unless too few came for its sum to be made.

    A job may have made a sum, or a keeper told it, even where the round is void in the end.
    """
    state = ChargeState.RELEASED if row.job_id is None else ChargeState.SPENT
    _move(session, row.federation_id, row.number, state)


def distribution(session: Session, federation_id: str) -> dict[int, int]:
    """Count the devices by the number of rounds that they have spent or reserved."""
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
