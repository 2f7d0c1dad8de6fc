"""Routes by which devices take part in federations: offers, membership, invitations, contributions.

The owner of a device decides on the device whether it takes part. The service checks the bytes of a
contribution strictly before it stores anything. If it refuses a contribution, it drops the bytes and counts
the error code.
"""

import logging
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy.orm import Session

from permille.digests import digest_of
from permille.errors import PackageError
from permille.schemas.problems import ProblemType
from permille.store import rows, tables
from permille.store.database import now
from permille.store.jobs.dispatch import dispatch
from permille_rounds.definition import Definition, decode_key
from permille_rounds.masked import decode_sent
from permille_rounds.schemas import (
    CONTRIBUTION_EXAMPLES,
    ContributionReceipt,
    FederationOffer,
    RoundInvitation,
)
from permille_rounds.service.records import present_offer
from permille_rounds.service.routes import FederationId, RoundNumber
from permille_rounds.store import contributions, definitions, members
from permille_service.access.principals import CallingDevice, DevicePrincipal
from permille_service.context import Served, Service
from permille_service.parameters import BINARY, media_type_of, raw_body, read_body
from permille_service.problems import PRIVATE, documented

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/v1", tags=["federations"], responses=documented(*PRIVATE))


@router.get("/device/federations")
def list_own_federations(service: Served, device: CallingDevice) -> list[FederationOffer]:
    """List the federations that the calling device may join or is a member of."""
    with service.database.read() as session:
        found = members.offers(
            session, tenant_id=device.tenant_id, release=device.release, device_id=device.device_id
        )
    return rows.records_of(found, lambda one: present_offer(one[0], member=one[1]))


@router.put(
    "/federations/{federation_id}/membership",
    status_code=204,
    responses=documented(ProblemType.NOT_FOUND, ProblemType.CONFLICT),
)
def put_membership(federation_id: FederationId, service: Served, device: CallingDevice) -> None:
    """Join a federation. The device's owner must have agreed. Idempotent."""
    # Calls to join are limited. Calls to leave are not, because nothing may delay a withdrawal.
    service.sign_ins.check(f"{device.device_id} membership")
    with service.database.write() as session:
        row = _federation(session, device, federation_id)
        members.join(session, federation=row, device_id=device.device_id)


@router.delete(
    "/federations/{federation_id}/membership",
    status_code=204,
    responses=documented(ProblemType.NOT_FOUND),
)
def delete_membership(federation_id: FederationId, service: Served, device: CallingDevice) -> None:
    """Leave a federation. The device's contribution to the open round is deleted. Idempotent."""
    with service.database.write() as session:
        _federation(session, device, federation_id)
        members.leave(session, device_id=device.device_id, federation_id=federation_id)


@router.post(
    "/federations/{federation_id}/invitations",
    status_code=201,
    responses={
        204: {"description": "not invited to this round, or no round is open; ask again at the next poll"},
        **documented(ProblemType.NOT_FOUND),
    },
    response_model=RoundInvitation,
)
def create_round_invitation(
    federation_id: FederationId, service: Served, device: CallingDevice
) -> RoundInvitation | Response:
    """Ask whether the calling member is invited to the open round. A hash of round and device decides this.
    So a repeated question gets the same answer, unless the number of members with privacy budget has
    changed."""
    service.sign_ins.check(f"{device.device_id} rounds")
    with service.database.write() as session:
        row = _federation(session, device, federation_id)
        invited = contributions.invite(session, federation=row, device_id=device.device_id)
        at = now(session)
    if invited is None:
        return Response(status_code=204)
    round_row, _ = invited
    return RoundInvitation(
        round=round_row.number,
        # If the database's clock went back, more time than the federation allows may seem to be left.
        seconds_left=max(0.0, min(row.deadline_s, (round_row.deadline_at - at).total_seconds())),
        start_digest=round_row.start_digest,
    )


async def _body(request: Request) -> bytes:
    media_type_of(request, CONTRIBUTION_EXAMPLES)
    return await read_body(request)


@router.put(
    "/federations/{federation_id}/rounds/{number}/contribution",
    status_code=202,
    openapi_extra=raw_body(CONTRIBUTION_EXAMPLES, BINARY),
    responses={
        200: {"model": ContributionReceipt, "description": "the device has already sent the same bytes"},
        **documented(
            ProblemType.NOT_FOUND,
            ProblemType.TOO_MANY_REQUESTS,
            ProblemType.ROUND_CLOSED,
            ProblemType.CONTRIBUTION_CONFLICT,
            ProblemType.BUDGET_SPENT,
            ProblemType.UNSUPPORTED_MEDIA_TYPE,
            ProblemType.PACKAGE_REFUSED,
        ),
    },
)
def put_contribution(
    federation_id: FederationId,
    number: RoundNumber,
    service: Served,
    device: CallingDevice,
    response: Response,
    data: Annotated[bytes, Depends(_body)],
) -> ContributionReceipt:
    """Send the device's contribution to a round (FORMAT 13.2, 13.7). A device may send the same bytes
    again."""
    with service.database.read() as session:
        row = _federation(session, device, federation_id)
        place = contributions.place_of(session, federation=row, number=number, device_id=device.device_id)
        own = rows.get(session, tables.Device, tenant_id=device.tenant_id, row_id=device.device_id)
    try:
        decode_sent(data, Definition.from_bytes(row.definition), decode_key(own.public_key), place)
    except PackageError as exc:
        # Limit only refused contributions. Their check costs time, and no row in the database limits them.
        service.sign_ins.check(f"{device.device_id} refused")
        _note_refusal(service, row, number, exc)
        raise
    sent = contributions.Sent(
        federation_id=row.id,
        number=number,
        device_id=device.device_id,
        data=data,
        digest=digest_of(data),
    )
    with service.database.write() as session:
        row = _federation(session, device, federation_id)
        is_new, job_id = contributions.accept(session, federation=row, sent=sent)
    # If this contribution reaches the round's target, `accept` queues the job that closes the round.
    dispatch(service.dispatcher, [job_id] if job_id else [])
    response.status_code = 202 if is_new else 200
    return ContributionReceipt(round=number, digest=sent.digest)


@router.delete(
    "/federations/{federation_id}/rounds/{number}/contribution",
    status_code=204,
    responses=documented(ProblemType.NOT_FOUND),
)
def delete_contribution(
    federation_id: FederationId, number: RoundNumber, service: Served, device: CallingDevice
) -> None:
    """Withdraw the device's contribution while the round is open. Idempotent."""
    with service.database.write() as session:
        row = _federation(session, device, federation_id)
        members.withdraw(session, federation_id=row.id, device_id=device.device_id, number=number)


def _federation(session: Session, device: DevicePrincipal, federation_id: str) -> tables.Federation:
    return definitions.for_device(
        session, tenant_id=device.tenant_id, release=device.release, federation_id=federation_id
    )


def _note_refusal(service: Service, row: tables.Federation, number: int, exc: PackageError) -> None:
    logger.warning("refused a contribution to round %d of %s: %s", number, row.id, exc.code)
    with service.database.write() as session:
        contributions.note_refusal(session, federation_id=row.id, number=number, code=exc.code)
