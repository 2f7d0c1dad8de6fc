"""The round job: what devices sent to a round becomes one step of the federation's state.

It is told which round is closing; what was sent does not change from then on. Nothing leaves before the
transaction that publishes it, so a second attempt after a kill makes the same bytes; of a private round it
draws other noise, or gets a keeper's again.
"""

import math
import statistics
from collections.abc import Sequence

from sqlalchemy.orm import Session

from permille.errors import InputError, OperatorError, PackageError
from permille.federation.catch_up import pack_state
from permille.federation.contribution import Contribution
from permille.federation.definition import GAIN_NATS, Definition, decode_key
from permille.federation.masked import Masked, decode_sent
from permille.federation.private_rounds import noised_gains, round_of_sum
from permille.federation.rounds import History, Round, combine, decode_segment
from permille.schemas.federations import RoundRequest
from permille.store.federations import contributions, definitions, history, rounds
from permille.store.federations.contributions import Received
from permille.store.federations.history import Way
from permille.store.federations.rounds import Ended
from permille.zo.packed_state import decode_state
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.private_sums import private_sum


def run(context: TaskContext, request: RoundRequest) -> Publish:
    """Combine what has come, and move the federation on by it.

    Raises:
        OperatorError: what is stored is damaged.
    """
    tenant_id = context.claim.tenant_id
    with context.db.read() as session:
        row = definitions.get(session, tenant_id=tenant_id, federation_id=request.federation_id)
        definition = Definition.from_bytes(row.definition)
        if row.number != request.number:
            raise InputError(f"expected round {row.number} to close, got {request.number}")
        way = history.newest_way(session, row)
        received = contributions.received(session, federation_id=row.id, number=request.number)
    context.progress(0.0, "reading the state")
    before = _history(definition, way)
    context.progress(0.2, f"combining {len(received)} contributions")
    token = context.settings.keeper_token
    ended = close(before, received, None if token is None else token.get_secret_value())

    def publish(session: Session) -> str:
        federation = rounds.lock_federation(session, tenant_id=tenant_id, federation_id=request.federation_id)
        if isinstance(ended, Ended):
            rounds.publish(session, federation=federation, number=request.number, ended=ended)
        else:
            row = rounds.lock_closing(session, federation, request.number)
            rounds.void(session, federation, row, ended)
        return f"{federation.id}/rounds/{request.number}"

    return publish


def close(history: History, received: Sequence[Received], keeper_token: str | None = None) -> Ended | str:
    """Compute the result of a round from its contributions, or the reason that it is void.

    The history moves on by it.
    """
    definition = history.definition
    try:
        made, gains = _combined(definition, history.number, received, keeper_token)
        history.apply([made])
    except PackageError as exc:
        if exc.code != "round-limit":
            raise
        return str(exc)
    return Ended(
        record=made.to_bytes(),
        counted=len(received),
        state_digest=history.digest,
        reach=history.reach,
        state=pack_state(definition, history.s_W),
        gains=gains,
    )


def _combined(
    definition: Definition, number: int, received: Sequence[Received], keeper_token: str | None
) -> tuple[Round, tuple[float, float] | None]:
    """The round of these contributions; mean and standard error of their gains, in nats a token, or None."""
    sent = [_decode(definition, one) for one in received]
    if definition.privacy is not None:
        sum_V = private_sum(definition, number, sent, keeper_token)
        made = round_of_sum(definition, number, len(sent), sum_V)
        return made, noised_gains(definition, len(sent), int(sum_V[-1]))
    plain = [one for one in sent if isinstance(one, Contribution)]
    return combine(definition, number, plain), _gains(definition, [one.gain for one in plain])


def _decode(definition: Definition, one: Received) -> Contribution | Masked:
    try:
        return decode_sent(one.data, definition, decode_key(one.public_key), one.place)
    except PackageError as exc:
        raise OperatorError(f"expected what {one.device_id} sent as it was accepted, got {exc}") from exc


def _history(definition: Definition, way: Way) -> History:
    log = definition.log
    found = History.begin(definition)
    try:
        if way.checkpoint is not None:
            state, head = way.checkpoint
            found.s_W = decode_state(state, max_bytes=len(state), max_k=log.k).s_K
            found.number, found.reach, found.chain = head.number, head.reach, head.chain
        segment = b"".join(way.records)
        found.apply(decode_segment(segment, definition, max_bytes=len(segment)))
    except PackageError as exc:
        raise OperatorError(f"expected the history of {definition.digest} as it was stored: {exc}") from exc
    if found.head != way.head:
        raise OperatorError(f"expected the history of {definition.digest} as it was stored, got another")
    return found


def _gains(definition: Definition, gains: Sequence[int]) -> tuple[float, float] | None:
    """Mean and standard error of what devices measured, in nats a token; None where there are too few."""
    if len(gains) < 2:
        return None
    unit = GAIN_NATS / definition.gain_bound
    return unit * statistics.fmean(gains), unit * statistics.stdev(gains) / math.sqrt(len(gains))
