"""The noised sum of a private round: with noise of our own, or with a keeper's, who is asked over HTTPS.

In mode keeper this process never sees a device's integers. The keeper answers one set of devices with one
answer, durably, so that a second attempt of the job gets the same bytes; while it is down the job is retried.
"""

import http.client
import logging
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError, OperatorError, PackageError, RetryableError
from permille.federation.contribution import Contribution
from permille.federation.definition import Definition
from permille.federation.masked import Masked, Opening, decode_answer, opening_of
from permille.federation.private_rounds import draw_round_noise, noised_sum, unmasked_sum

KEEPER_PATH: Final = "/v1/sums"
_TIMEOUT_S: Final = 60.0  # between two bytes
_LONGEST_S: Final = 300.0  # of a question, as the keeper has it

_log = logging.getLogger(__name__)


def private_sum(
    definition: Definition, number: int, sent: Sequence[Contribution | Masked], keeper_token: str | None
) -> NDArray[np.int64]:
    """The sum of the devices' vectors with noise, int64 [V], the gain last.

    Raises:
        RetryableError: the keeper does not answer now.
        OperatorError: the keeper refuses; no other attempt would change that.
    """
    masked = [each for each in sent if isinstance(each, Masked)]
    plain = [each for each in sent if isinstance(each, Contribution)]
    if definition.privacy is None or bool(masked) == bool(plain):
        raise InputError("expected contributions of one kind to a federation with privacy")
    if plain:
        return noised_sum(definition, number, plain, draw_round_noise(definition))
    opening = opening_of(definition, number, masked)
    return unmasked_sum(definition, number, masked, ask_keeper(opening, keeper_token))


def ask_keeper(opening: Opening, token: str | None) -> NDArray[np.uint32]:
    """The sum of the masks of these devices less noise, uint32 [V].

    Raises:
        RetryableError, OperatorError: as `private_sum`.
    """
    found: queue.SimpleQueue[NDArray[np.uint32] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found.put(_ask(opening, token))
        except Exception as exc:  # noqa: BLE001 - raised below
            found.put(exc)

    threading.Thread(target=ask, daemon=True).start()  # a slow answer ends with this attempt's process
    try:
        answer = found.get(timeout=_LONGEST_S)
    except queue.Empty:
        raise RetryableError(f"expected the keeper's whole answer within {_LONGEST_S:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Take a redirection as the refusal that it is: the token is for the keeper of the definition alone."""

    def redirect_request(self, *_: object) -> None:
        return None


def _ask(opening: Opening, token: str | None) -> NDArray[np.uint32]:
    privacy = opening.definition.privacy
    if privacy is None or privacy.keeper is None:
        raise InputError("expected a federation with a keeper")
    if token is None:
        raise OperatorError("expected PERMILLE_KEEPER_TOKEN, as `permille-keeper init` showed it, got none")
    question = urllib.request.Request(  # noqa: S310 - a definition's url is https, or of this machine
        privacy.keeper.url.rstrip("/") + KEEPER_PATH,
        data=opening.to_bytes(),
        headers={"authorization": f"Bearer {token}", "content-type": "application/octet-stream"},
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(question, timeout=_TIMEOUT_S) as answer:
            return decode_answer(answer.read(opening.answer_bytes + 1), opening)
    except urllib.error.HTTPError as exc:
        reason = _reason(exc)
        _log.warning("the keeper refused with %d: %s", exc.code, reason)
        if exc.code >= 500 or exc.code == 429:
            raise RetryableError(f"expected the keeper's answer, got {exc.code}: {reason}") from exc
        raise OperatorError(f"expected the keeper's answer, got {exc.code}: {reason}") from exc
    except (OSError, http.client.HTTPException, PackageError) as exc:  # also half an answer
        raise RetryableError(f"expected an answer of the keeper at {privacy.keeper.url}, got {exc}") from exc


def _reason(refusal: urllib.error.HTTPError) -> str:
    """Return the text of a refusal, as far as it arrives."""
    try:
        return refusal.read(1000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as exc:
        return f"nothing more: {exc}"
