"""The round job: combine the contributions of a round into one step of the federation's state.

A closing round accepts no more contributions. The result leaves the process only in the transaction that
publishes it, so if the process is killed, nobody has seen the result. A second attempt then makes the same
bytes, with one exception: if the service adds the noise, the attempt draws new noise. A keeper draws
no new noise, but gives its earlier answer again.

In the mode `keeper`, this process never sees the integers of a device. It asks the keeper over HTTPS for the
sum of the devices' masks minus noise, and only learns the noised sum of the integers. The keeper stores its
answer for a set of devices, and gives the same answer again. While the keeper is down, the job is retried.

A contribution that cannot be read, or whose seal the keeper cannot open, does not end the round of the
others. It is dropped and recorded with its device. If fewer contributions than the minimum are left, the
round opens again until its deadline.
"""

import http.client
import logging
import math
import queue
import statistics
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from permille.errors import InputError, OperatorError, PackageError, RetryableError
from permille.retry_after import stated_wait_s
from permille.store import rows
from permille.store.tables import Federation
from permille.zo.packed_state import decode_state
from permille_rounds.catch_up import pack_state
from permille_rounds.contribution import Contribution
from permille_rounds.definition import GAIN_NATS, Definition, decode_key
from permille_rounds.masked import (
    Masked,
    Opening,
    UnopenedSealsError,
    decode_answer,
    decode_refusal,
    decode_sent,
    opening_of,
)
from permille_rounds.private_rounds import (
    draw_round_noise,
    noised_gains,
    noised_sum,
    round_of_sum,
    unmasked_sum,
)
from permille_rounds.rounds import History, Round, combine, decode_segment
from permille_rounds.schemas import RoundRequest
from permille_rounds.store import contributions, history, rounds
from permille_rounds.store.contributions import Received
from permille_rounds.store.history import Way
from permille_rounds.store.rounds import Ended
from permille_workers.runtime.context import Publish, TaskContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The result of closing a round.

    Attributes:
        ended: the round's result, the reason why the round is void, or None if too few contributions are
            left.
        dropped: the devices whose contributions were left out, with the error codes.
    """

    ended: Ended | str | None
    dropped: Mapping[str, str]


def run(context: TaskContext, request: RoundRequest) -> Publish:
    """Combine the received contributions, and publish the federation's next state.

    Raises:
        InputError: the federation is at another round.
        OperatorError: the stored history is damaged, or the keeper refuses.
    """
    tenant_id = context.claim.tenant_id
    with context.db.read() as session:
        row = rows.get(session, Federation, tenant_id=tenant_id, row_id=request.federation_id)
        definition = Definition.from_bytes(row.definition)
        if row.number != request.number:
            raise InputError(f"The federation is at round {row.number}, not at round {request.number}.")
        way = history.newest_way(session, row)
        received = contributions.received(session, federation_id=row.id, number=request.number)
    context.progress(0.0, "reading the state")
    before = _history(definition, way)
    context.progress(0.2, f"combining {len(received)} contributions")
    token = context.settings.keeper_token
    closed = close(before, received, None if token is None else token.get_secret_value())
    for device_id, code in closed.dropped.items():
        _log.warning("round %d of %s: dropped %s: %s", request.number, row.id, device_id, code)

    def publish(session: Session) -> str:
        federation = rows.lock(session, Federation, tenant_id=tenant_id, row_id=request.federation_id)
        row = rounds.lock_closing(session, federation, request.number)
        rounds.drop(session, row, closed.dropped)
        if isinstance(closed.ended, Ended):
            rounds.publish(session, federation=federation, number=request.number, ended=closed.ended)
        elif closed.ended is None:
            rounds.reopen(session, federation, row)
        else:
            rounds.void(session, federation, row, closed.ended)
        return f"{federation.id}/rounds/{request.number}"

    return publish


def close(history: History, received: Sequence[Received], keeper_token: str | None = None) -> Closed:
    """Compute the result of a round and apply it to `history`, unless the round is void or lacks devices."""
    definition = history.definition
    sent, dropped = _decoded(definition, received)
    try:
        ended = _ended(history, list(sent.values()), keeper_token)
    except UnopenedSealsError as exc:
        unopened = {
            device_id: exc.code
            for device_id, one in sent.items()
            if isinstance(one, Masked) and one.device_key in exc.device_keys
        }
        dropped |= unopened
        left = [one for device_id, one in sent.items() if device_id not in unopened]
        # The keeper has named all such devices. If it names more now, it contradicts itself: the job fails.
        ended = _ended(history, left, keeper_token)
    return Closed(ended=ended, dropped=dropped)


def _decoded(
    definition: Definition, received: Sequence[Received]
) -> tuple[dict[str, Contribution | Masked], dict[str, str]]:
    """Return the contributions by device, and the error codes of those that cannot be read.

    The API has checked all of them, so such a contribution was damaged in the database, or another version of
    permille has checked it.
    """
    sent: dict[str, Contribution | Masked] = {}
    dropped: dict[str, str] = {}
    for one in received:
        try:
            sent[one.device_id] = decode_sent(one.data, definition, decode_key(one.public_key), one.place)
        except PackageError as exc:
            dropped[one.device_id] = exc.code
    return sent, dropped


def _ended(
    history: History, sent: Sequence[Contribution | Masked], keeper_token: str | None
) -> Ended | str | None:
    definition = history.definition
    if len(sent) < definition.minimum:
        return None
    try:
        made, gains = _combined(definition, history.number, sent, keeper_token)
        history.apply([made])
    except PackageError as exc:
        if exc.code != "round-limit":
            raise
        return str(exc)
    return Ended(
        record=made.to_bytes(),
        counted=len(sent),
        state_digest=history.digest,
        reach=history.reach,
        state=pack_state(definition, history.s_W),
        gains=gains,
    )


def _combined(
    definition: Definition, number: int, sent: Sequence[Contribution | Masked], keeper_token: str | None
) -> tuple[Round, tuple[float, float] | None]:
    """Return the round, and the mean and standard error of its gains in nats per token (None: unknown)."""
    if definition.privacy is not None:
        sum_V = private_sum(definition, number, sent, keeper_token)
        made = round_of_sum(definition, number, len(sent), sum_V)
        return made, noised_gains(definition, len(sent), int(sum_V[-1]))
    plain = [one for one in sent if isinstance(one, Contribution)]
    return combine(definition, number, plain), _gains(definition, [one.gain for one in plain])


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
        raise OperatorError(f"The stored history of {definition.digest} is damaged: {exc}") from exc
    if found.head != way.head:
        raise OperatorError(f"The stored history of {definition.digest} leads to another state.")
    return found


def _gains(definition: Definition, gains: Sequence[int]) -> tuple[float, float] | None:
    """Return the mean and the standard error of the gains in nats per token.

    Return None for fewer than two devices.
    """
    if len(gains) < 2:
        return None
    unit = GAIN_NATS / definition.gain_bound
    return unit * statistics.fmean(gains), unit * statistics.stdev(gains) / math.sqrt(len(gains))


KEEPER_PATH: Final = "/v1/sums"
_TIMEOUT_S: Final = 60.0  # longest time between two bytes
_LONGEST_S: Final = 300.0  # longest time for the whole answer; the keeper has the same limit

_log = logging.getLogger(__name__)


def private_sum(
    definition: Definition, number: int, sent: Sequence[Contribution | Masked], keeper_token: str | None
) -> NDArray[np.int64]:
    """Return the noised sum of the devices' vectors, int64 [V]. Its last element is the sum of the gains.

    Raises:
        RetryableError: the keeper does not answer.
        UnopenedSealsError: the keeper cannot open the seals of some devices.
        OperatorError: the keeper refuses, so a retry is pointless.
    """
    masked = [each for each in sent if isinstance(each, Masked)]
    plain = [each for each in sent if isinstance(each, Contribution)]
    if definition.privacy is None or bool(masked) == bool(plain):
        raise InputError("The contributions to a private round must be all plain or all masked.")
    if plain:
        return noised_sum(definition, number, plain, draw_round_noise(definition))
    opening = opening_of(definition, number, masked)
    return unmasked_sum(definition, number, masked, ask_keeper(opening, keeper_token))


def ask_keeper(opening: Opening, token: str | None) -> NDArray[np.uint32]:
    """Ask the keeper for the sum of the devices' masks minus noise, uint32 [V].

    Raises:
        RetryableError: the keeper does not answer.
        UnopenedSealsError: the keeper cannot open the seals of some devices.
        OperatorError: the keeper refuses, or the settings have no token for it.
    """
    found: queue.SimpleQueue[NDArray[np.uint32] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found.put(_ask(opening, token))
        except Exception as exc:  # noqa: BLE001 - the waiting thread raises it
            found.put(exc)

    # If the answer takes too long, this daemon thread ends together with the process of this attempt.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = found.get(timeout=_LONGEST_S)
    except queue.Empty:
        raise RetryableError(f"The keeper did not answer within {_LONGEST_S:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that treats a redirect as a refusal, so that only the definition's keeper gets the token."""

    def redirect_request(self, *_: object) -> None:
        return None


def _ask(opening: Opening, token: str | None) -> NDArray[np.uint32]:
    privacy = opening.definition.privacy
    if privacy is None or privacy.keeper is None:
        raise InputError("This federation has no keeper.")
    if token is None:
        raise OperatorError("Set PERMILLE_KEEPER_TOKEN to the token that `permille-keeper init` showed.")
    question = urllib.request.Request(  # noqa: S310 - the URL of a keeper is https or loopback
        privacy.keeper.url.rstrip("/") + KEEPER_PATH,
        data=opening.to_bytes(),
        headers={"authorization": f"Bearer {token}", "content-type": "application/octet-stream"},
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(question, timeout=_TIMEOUT_S) as answer:
            return decode_answer(answer.read(opening.answer_bytes + 1), opening)
    except urllib.error.HTTPError as exc:
        if exc.code == HTTPStatus.FAILED_DEPENDENCY:
            raise UnopenedSealsError(_unopened(exc, opening)) from exc
        reason = _reason(exc)
        _log.warning("the keeper refused with %d: %s", exc.code, reason)
        if exc.code >= 500 or exc.code == 429:
            raise RetryableError(
                f"The keeper cannot answer now ({exc.code}): {reason}",
                retry_after_s=stated_wait_s({name.lower(): value for name, value in exc.headers.items()}),
            ) from exc
        raise OperatorError(f"The keeper refuses ({exc.code}): {reason}") from exc
    except (OSError, http.client.HTTPException, PackageError) as exc:  # also if the answer is incomplete
        raise RetryableError(f"The keeper at {privacy.keeper.url} does not answer: {exc}") from exc


def _unopened(refusal: urllib.error.HTTPError, opening: Opening) -> tuple[bytes, ...]:
    """Return the keys of the devices whose seals do not open. Raises RetryableError."""
    try:
        return decode_refusal(refusal.read(opening.refusal_bytes + 1), opening)
    except (OSError, http.client.HTTPException, PackageError) as exc:
        raise RetryableError(f"The keeper names no devices whose seals do not open: {exc}") from exc


def _reason(refusal: urllib.error.HTTPError) -> str:
    """Return the text of a refusal, or the error that occurred while it was read."""
    try:
        return refusal.read(1000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as exc:
        return f"the reason could not be read: {exc}"
