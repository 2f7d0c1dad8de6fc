"""Routes of federations for operators, and routes of the files that devices may read as well."""

import logging
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi import APIRouter, Path, Query, Response
from sqlalchemy.orm import Session

from permille.package.reader import Package
from permille.schemas.fields import MAX_INTEGER, Page
from permille.schemas.problems import ProblemType
from permille.store import releases, rows, tables
from permille.store.errors import ConflictError, NotFoundError
from permille.store.jobs.dispatch import dispatch
from permille.trust.metadata import KeyElsewhereError
from permille.trust.repository import Repository
from permille.trust.roles import federation_path
from permille_rounds.catch_up import PooledCheckpoint, encode_catch_up
from permille_rounds.definition import Definition
from permille_rounds.schemas import (
    CATCH_UP_MEDIA_TYPE,
    DEFINITION_MEDIA_TYPE,
    EVIDENCE_DEVICES,
    MAX_ROUNDS,
    ROUND_MEDIA_TYPE,
    Adoption,
    AdoptionCreate,
    Federation,
    FederationCreate,
    FederationPrivacy,
    RoundRecord,
)
from permille_rounds.service.keys import RoundKeys
from permille_rounds.service.making import define
from permille_rounds.service.records import adoption_of, present, present_privacy, present_round
from permille_rounds.store import charges, definitions, history
from permille_rounds.store.definitions import NewFederation
from permille_service.access.principals import Anyone, DevicePrincipal, Maker, Operator, Viewer, changing
from permille_service.content import CACHE_CONTROL, body_of
from permille_service.context import Served, Service
from permille_service.creation import MADE_RESPONSES, Creating
from permille_service.parameters import NumberPaging, Paging, key_of, page_of
from permille_service.problems import PRIVATE, as_conflicts, documented
from permille_service.trust import repositories

logger = logging.getLogger(__name__)
router = APIRouter(
    prefix="/v1/federations", tags=["federations"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)
FederationId = Annotated[str, key_of("fed")]
RoundNumber = Annotated[int, Path(alias="number", ge=0, le=MAX_ROUNDS, examples=[0])]
_After = Annotated[
    int, Query(ge=0, le=MAX_INTEGER, description="number of rounds that the caller has already")
]
_Until = Annotated[
    int | None,
    Query(ge=0, le=MAX_INTEGER, description="number of rounds that the caller wants to have; default: all"),
]


@router.post("", status_code=201, responses=MADE_RESPONSES)
def create_federation(body: FederationCreate, creating: Creating) -> Federation:
    """Define a federation on a release. Once it is started, devices that follow the release may join."""
    service, tenant_id = creating.service, creating.operator.tenant_id
    with service.database.read() as session:
        version = body.version or releases.latest_version(session, tenant_id=tenant_id, name=body.release)
        release = releases.get(session, tenant_id=tenant_id, name=body.release, version=version)
    if release.yanked_at is not None:
        raise ConflictError(f"{body.release!r} version {version} was yanked. Choose another version.")
    # Open the package before the write transaction, because a download from a bucket would prolong it.
    package = Package.open(service.blobs, release.package_digest)

    def make(session: Session) -> Federation:
        key = Ed25519PrivateKey.generate()
        with as_conflicts():  # each value fits its schema, but values can contradict each other
            definition = define(package, body, key.public_key())
        new = NewFederation(
            name=body.name,
            definition=definition,
            target=body.schedule.target,
            deadline_s=body.schedule.deadline_s,
        )
        record = present(session, definitions.add(session, release=release, new=new))
        RoundKeys(service.settings.keys_dir).keep(
            tenant_id, key
        )  # not earlier, because refused requests must leave no keys
        return record

    return creating.add(Federation, body, make)


@router.get("")
def list_federations(service: Served, operator: Viewer, window: Paging) -> Page[Federation]:
    """List federations, newest first."""
    with service.database.read() as session:
        page = rows.list_all(session, tables.Federation, tenant_id=operator.tenant_id, window=window)
        return page_of(page, lambda row: present(session, row))


@router.get("/{federation_id}")
def get_federation(federation_id: FederationId, service: Served, operator: Viewer) -> Federation:
    """Read one federation."""
    with service.database.read() as session:
        row = rows.get(session, tables.Federation, tenant_id=operator.tenant_id, row_id=federation_id)
        return present(session, row)


@router.post("/{federation_id}/start", responses=documented(ProblemType.CONFLICT))
def start_federation(federation_id: FederationId, service: Served, operator: Maker) -> Federation:
    """Start a federation, or continue it after a pause. Devices may then join, and rounds begin. The signed
    trust metadata lists the definition of the federation."""

    def start(session: Session, repository: Repository) -> Federation:
        row = rows.lock(session, tables.Federation, tenant_id=operator.tenant_id, row_id=federation_id)
        definitions.start(session, row)
        repository.list_federation(row.definition)
        return present(session, row)

    return repositories.change_by(service, operator, start)


@router.post("/{federation_id}/pause", responses=documented(ProblemType.CONFLICT))
def pause_federation(federation_id: FederationId, service: Served, operator: Maker) -> Federation:
    """Pause a federation, so that no more devices are invited. The open round still accepts contributions. No
    further round opens before the next start."""
    with changing(service, operator) as session:
        row = rows.lock(session, tables.Federation, tenant_id=operator.tenant_id, row_id=federation_id)
        definitions.pause(row)
        return present(session, row)


@router.post("/{federation_id}/finish", responses=documented(ProblemType.CONFLICT))
def finish_federation(federation_id: FederationId, service: Served, operator: Maker) -> Federation:
    """End a federation for good. Its open round closes with the contributions that have arrived. The trust
    metadata no longer lists its definition."""
    job_ids: list[str] = []

    def finish(session: Session, repository: Repository) -> Federation:
        row = rows.lock(session, tables.Federation, tenant_id=operator.tenant_id, row_id=federation_id)
        job_id = definitions.finish(session, row)
        # The transaction may run twice, so replace the list and do not extend it.
        job_ids[:] = [job_id] if job_id else []
        try:
            repository.drop(federation_path(row.definition_digest))
        except KeyElsewhereError as exc:
            # The removal can wait for the key's holder. The state of the federation already tells devices
            # that it is finished.
            logger.warning(
                "%s stays listed in the metadata until a holder of the key signs its removal: %s", row.id, exc
            )
        return present(session, row)

    record = repositories.change_by(service, operator, finish)
    dispatch(service.dispatcher, job_ids)
    return record


@router.post("/{federation_id}/adoptions", status_code=201, responses=documented(ProblemType.CONFLICT))
def create_adoption(
    federation_id: FederationId, body: AdoptionCreate, service: Served, operator: Maker
) -> Adoption:
    """Choose the state that the federation had after `round` rounds. From now on, devices of the federation
    start their training from this state. If its gain is uncertain, the request must give a reason."""
    with changing(service, operator, body) as session:
        row = rows.lock(session, tables.Federation, tenant_id=operator.tenant_id, row_id=federation_id)
        adoption = _adoption(session, row, body.round)
        if not adoption.sure and body.reason is None:
            raise ConflictError(
                f"It is not certain that the state after {adoption.round} rounds is better "
                f"({_gain_words(adoption)}). To adopt it without a reason, its gain must be surely above 0, "
                f"measured by at least {EVIDENCE_DEVICES} devices. Give a reason to adopt the state anyway."
            )
        row.adopted_round = adoption.round
        return adoption


@router.get("/{federation_id}/privacy")
def get_federation_privacy(
    federation_id: FederationId, service: Served, operator: Viewer
) -> FederationPrivacy:
    """Read the privacy guarantee of a federation, and how much of it the devices have used."""
    with service.database.read() as session:
        row = rows.get(session, tables.Federation, tenant_id=operator.tenant_id, row_id=federation_id)
        return present_privacy(row, charges.distribution(session, row.id))


@router.get("/{federation_id}/rounds")
def list_rounds(
    federation_id: FederationId, service: Served, operator: Viewer, window: NumberPaging
) -> Page[RoundRecord]:
    """List the rounds of a federation, newest first."""
    with service.database.read() as session:
        row = rows.get(session, tables.Federation, tenant_id=operator.tenant_id, row_id=federation_id)
        page = history.list_rounds(session, row, window)
        return page_of(page, lambda one: present_round(session, one))


@router.get("/{federation_id}/rounds/{number}")
def get_round(
    federation_id: FederationId, number: RoundNumber, service: Served, operator: Viewer
) -> RoundRecord:
    """Read one round."""
    with service.database.read() as session:
        row = rows.get(session, tables.Federation, tenant_id=operator.tenant_id, row_id=federation_id)
        return present_round(session, history.get_round(session, row, number))


@router.get(
    "/{federation_id}/definition",
    response_class=Response,
    responses={
        200: body_of("canonical JSON, whose SHA-256 is the definition's digest", DEFINITION_MEDIA_TYPE)
    },
)
def get_federation_definition(federation_id: FederationId, service: Served, principal: Anyone) -> Response:
    """Read the definition of a federation (FORMAT 13.1).

    Devices compare its digest with the trust metadata.
    """
    with service.database.read() as session:
        row = _readable(session, principal, federation_id)
    return Response(
        row.definition, media_type=DEFINITION_MEDIA_TYPE, headers={"Cache-Control": CACHE_CONTROL}
    )


@router.get(
    "/{federation_id}/history",
    response_class=Response,
    responses={200: body_of("a catch-up file (FORMAT 13.5)", CATCH_UP_MEDIA_TYPE)},
)
def get_federation_history(
    federation_id: FederationId,
    service: Served,
    principal: Anyone,
    after: _After = 0,
    until: _Until = None,
) -> Response:
    """Read the records of the rounds that the caller lacks. If a checkpoint has fewer bytes than the records
    before it, the answer has the checkpoint instead of these records."""
    with service.database.read() as session:
        row = _readable(session, principal, federation_id)
        way = history.way_to(session, row, after=after, until=row.number if until is None else until)
    return Response(_catch_up(service, row, way), media_type=CATCH_UP_MEDIA_TYPE)


@router.get(
    "/{federation_id}/rounds/{number}/record",
    response_class=Response,
    responses={200: body_of("a round (FORMAT 13.3)", ROUND_MEDIA_TYPE)},
)
def get_round_record(
    federation_id: FederationId, number: RoundNumber, service: Served, principal: Anyone
) -> Response:
    """Read the published record of a round."""
    with service.database.read() as session:
        row = _readable(session, principal, federation_id)
        record = history.get_round(session, row, number).record
    if record is None:
        raise NotFoundError(f"Round {number} has no record yet.")
    return Response(record, media_type=ROUND_MEDIA_TYPE, headers={"Cache-Control": CACHE_CONTROL})


def _readable(
    session: Session, principal: Operator | DevicePrincipal, federation_id: str
) -> tables.Federation:
    tenant_id = principal.tenant_id
    if isinstance(principal, DevicePrincipal):
        return definitions.for_device(
            session, tenant_id=tenant_id, release=principal.release, federation_id=federation_id
        )
    return rows.get(session, tables.Federation, tenant_id=tenant_id, row_id=federation_id)


def _catch_up(service: Service, row: tables.Federation, way: history.Way) -> bytes:
    # Sign the heads of the rounds for each answer. Workers close the rounds, but have no keys to sign.
    key = RoundKeys(service.settings.keys_dir).read(row.tenant_id, Definition.from_bytes(row.definition).key)
    checkpoint = None
    if way.checkpoint is not None:
        state, head = way.checkpoint
        checkpoint = PooledCheckpoint(state=state, head=head.signed(key))
    return encode_catch_up(checkpoint, way.records, way.head.signed(key))


def _gain_words(adoption: Adoption) -> str:
    if adoption.mean_gain is None:
        return "none measured"
    low = "" if adoption.gain_low is None else f" (at least {adoption.gain_low:.3g})"
    return f"gain {adoption.mean_gain:.3g}{low} nats per token, number of devices: {adoption.devices}"


def _adoption(session: Session, row: tables.Federation, number: int | None) -> Adoption:
    """Return the measured gain of the state after `number` rounds.

    If `number` is None, return the gain of the newest state that was measured.
    """
    if number is None:
        number = history.newest_measured(session, row)
    if number is None:
        raise ConflictError("No round has a measured gain yet. Wait for the next round.")
    if number == row.number:  # no device has started from this state yet
        return Adoption(
            round=number, state_digest=row.state_digest, devices=0, mean_gain=None, gain_low=None, sure=False
        )
    return adoption_of(history.get_round(session, row, number))
